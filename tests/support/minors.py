"""The minor version of Kubernetes that the tests run on: PSEUDOREAL_KUBERNETES, else that of dev/tools."""

import os

import pytest
from pseudoreal_dev.cluster import binaries

KUBERNETES = os.environ.get("PSEUDOREAL_KUBERNETES") or None


def since(minor: str) -> pytest.MarkDecorator:
    """Return a mark that skips a test on older minor versions, whose API server lacks what the test needs."""
    running = binaries.version(KUBERNETES).removeprefix("v")
    return pytest.mark.skipif(
        _numbers(running) < _numbers(minor), reason=f"needs Kubernetes {minor}, this is {running}"
    )


def _numbers(version: str) -> list[int]:
    return [int(number) for number in version.split(".")]

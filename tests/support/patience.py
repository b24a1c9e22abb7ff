"""Waiting until something is so.

A wait ends as soon as it is, so its limit costs nothing but when a test fails: it is for a machine whose processors
others take for minutes, on which everything lasts five times as long."""

import time
from collections.abc import Callable
from typing import TypeVar

import pytest

T = TypeVar("T")

PATIENCE_SECONDS = 180.0


def wait_for(
    what: str,
    probe: Callable[[], T | None],
    explain: Callable[[], object] = str,
    patience: float = PATIENCE_SECONDS,
    pause: float = 0.1,
) -> T:
    """Polls until `probe` gives something true; fails with what `explain` says. `patience` and `pause`: in seconds."""
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        if found := probe():
            return found
        time.sleep(pause)
    pytest.fail(f"{what} did not happen within {patience:.0f} s: {explain()}")

"""Waits for conditions.

A wait ends as soon as its condition holds, so the limit costs time only if a test fails. The limit is for a busy
machine, on which everything takes five times as long.
"""

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
    """Poll until `probe` returns a true value, and return it; after `patience` seconds, fail with the result of
    `explain`."""
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        if found := probe():
            return found
        time.sleep(pause)
    pytest.fail(f"{what} did not happen within {patience:.0f} s: {explain()}")

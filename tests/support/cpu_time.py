"""Bounds of CPU time that hold on slow and busy machines, too: they scale with the time of a loop that is timed beside
them."""

import time
from collections.abc import Callable

_LOOP_SECONDS = 0.011
"""CPU time of `spin` on the machine that the bounds are set for."""


def spin(times: int = 1) -> None:
    for _ in range(times * 1_000_000):
        pass


def seconds(act: Callable[[], object], times: int = 1) -> float:
    """Return the least CPU time of `times` runs."""
    found = []
    for _ in range(times):
        begin = time.thread_time()
        act()
        found.append(time.thread_time() - begin)
    return min(found)


def slowness() -> float:
    """Return how many times as long as the machine that the bounds are set for this one computes; at least 1."""
    return max(1.0, seconds(spin, 2) / _LOOP_SECONDS)

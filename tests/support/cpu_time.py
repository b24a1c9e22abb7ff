"""Bounds of CPU time for machines of any speed: a bound is multiplied by `slowness()`, measured beside it."""

import time
from collections.abc import Callable

_LOOP_SECONDS = 0.011
"""CPU seconds of `spin()` on the reference machine."""


def spin(times: int = 1) -> None:
    for _ in range(times * 1_000_000):
        pass


def seconds(act: Callable[[], object], times: int = 1) -> float:
    """Return the CPU seconds of this thread in the fastest of `times` runs of `act`."""
    found = []
    for _ in range(times):
        begin = time.thread_time()
        act()
        found.append(time.thread_time() - begin)
    return min(found)


def slowness() -> float:
    """Return the CPU time of a loop on this machine, divided by its time on the reference machine; at least 1."""
    return max(1.0, seconds(spin, 2) / _LOOP_SECONDS)

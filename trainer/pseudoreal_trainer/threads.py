"""How many processors a process may use, and how many threads a rank has."""

import math
import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def threads_of(ranks: int) -> int:
    """Return the number of threads for one operation, on each of `ranks` ranks of this pod or machine."""
    return max(1, usable_processors() // ranks)


def usable_processors(cgroup: Path | None = None) -> int:
    """Return the number of processors of the affinity mask, or fewer where the container has a limit.

    The mask does not show that limit: a pod of 4 processors on a node of 128 would start 128 threads or processes,
    which the kernel then lets run for a thirtieth of the time. `cgroup`: where the container's limits stand.
    """
    allowed = len(os.sched_getaffinity(0))
    quota, period = _limit(cgroup or _CGROUP)
    return allowed if quota is None else max(1, min(allowed, math.ceil(quota / period)))


def _limit(cgroup: Path) -> tuple[int | None, int]:
    """Return the microseconds of all processors in each period, None for no limit, and those of the period."""
    found = _numbers(cgroup / "cpu.max") or [  # version 2, then version 1
        *_numbers(cgroup / "cpu" / "cpu.cfs_quota_us"),
        *_numbers(cgroup / "cpu" / "cpu.cfs_period_us"),
    ]
    match found:
        case [quota, period] if quota > 0 and period > 0:
            return quota, period
    return None, 1


def _numbers(file: Path) -> list[int]:
    """Return the numbers in a file; -1 for "max", which is no limit. Empty: it cannot be read."""
    try:
        return [-1 if word == "max" else int(word) for word in file.read_text().split()]
    except (OSError, ValueError):
        return []

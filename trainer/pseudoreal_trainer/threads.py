"""Number of processors usable by a process, and number of threads per rank."""

import math
import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def threads_of(ranks: int) -> int:
    """Return the number of intra-op threads for each of `ranks` ranks of this pod or machine."""
    return max(1, usable_processors() // ranks)


def usable_processors(cgroup: Path | None = None) -> int:
    """Return the number of processors in the affinity mask, or fewer if the container has a CPU limit.

    The mask does not show the CPU limit. A pod limited to 4 processors on a node of 128 would otherwise start 128
    threads or processes, and the kernel would run each for a thirtieth of the time. `cgroup` is the folder with the
    container's limits.
    """
    allowed = len(os.sched_getaffinity(0))
    quota, period = _limit(cgroup or _CGROUP)
    return allowed if quota is None else max(1, min(allowed, math.ceil(quota / period)))


def _limit(cgroup: Path) -> tuple[int | None, int]:
    """Return the CPU quota of all processors in microseconds per period, None for no limit, and the period in
    microseconds."""
    found = _numbers(cgroup / "cpu.max") or [  # cgroup version 2, then version 1
        *_numbers(cgroup / "cpu" / "cpu.cfs_quota_us"),
        *_numbers(cgroup / "cpu" / "cpu.cfs_period_us"),
    ]
    match found:
        case [quota, period] if quota > 0 and period > 0:
            return quota, period
    return None, 1


def _numbers(file: Path) -> list[int]:
    """Return the numbers in a file, with -1 for "max" (no limit); empty if the file cannot be read."""
    try:
        return [-1 if word == "max" else int(word) for word in file.read_text().split()]
    except (OSError, ValueError):
        return []

"""How many processors this process may use."""

import math
import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def usable_processors(cgroup: Path = _CGROUP) -> int:
    """Those of the affinity mask, or fewer where the container has a limit, which the mask does not show: a pod of 4
    processors on a node of 128 would start 128 processes, each with a shard in its memory."""
    allowed = len(os.sched_getaffinity(0))
    quota, period = _limit(cgroup)
    return allowed if quota is None else max(1, min(allowed, math.ceil(quota / period)))


def _limit(cgroup: Path) -> tuple[int | None, int]:
    """Microseconds of all processors in each period, None for no limit, and microseconds of the period."""
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
    except FileNotFoundError:
        return _limit_of_version_1(cgroup / "cpu")
    return None if quota == "max" else int(quota), int(period)


def _limit_of_version_1(cgroup: Path) -> tuple[int | None, int]:
    try:
        quota = int((cgroup / "cpu.cfs_quota_us").read_text())
        period = int((cgroup / "cpu.cfs_period_us").read_text())
    except FileNotFoundError:
        return None, 1
    return None if quota < 0 else quota, period

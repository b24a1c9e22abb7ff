"""Processors and memory that this process may use, from the process's affinity mask and its cgroup. Systems without
them, such as macOS, have only the limits of the machine."""

import math
import os
import re
import resource
from dataclasses import dataclass
from pathlib import Path

from pseudoreal_trainer.portable import peak_resident_bytes

_GROUPS, _OWN, _STATUS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup"), Path("/proc/self/status")
_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.max_usage_in_bytes", "memory.oom_control"),
    2: ("memory.max", "memory.current", "memory.peak", "memory.events"),
}
"""Cgroup version -> its files for limit, current use, peak and OOM kills."""
_NO_LIMIT = 1 << 60
"""Limits from this number of bytes on count as unlimited: cgroup v1 writes a large number, v2 the word max."""


def threads_of(ranks: int) -> int:
    """Return the number of intra-op threads for each of `ranks` ranks of this pod or machine."""
    return max(1, usable_processors() // ranks)


def usable_processors(cgroup: Path | None = None) -> int:
    """Return the number of processors in the affinity mask, or fewer if the container has a CPU limit.

    The mask does not show the CPU limit. A pod limited to 4 processors on a node of 128 would otherwise start 128
    threads or processes, and the kernel would run each for a thirtieth of the time. `cgroup`: folder with the
    container's limits.
    """
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, period = _limit(cgroup or _GROUPS)
    return allowed if quota is None else max(1, min(allowed, math.ceil(quota / period)))


def _limit(cgroup: Path) -> tuple[int | None, int]:
    """Return (quota, period) in microseconds: all processors together may run for the quota in each period. Quota
    None: no limit."""
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
        return [-1 if word == "max" else int(word) for word in file.read_text(encoding="utf-8").split()]
    except (OSError, ValueError):
        return []


@dataclass(frozen=True)
class PodMemory:
    """Memory figures of a pod, in bytes. None: the system does not report the figure, or the pod has no limit."""

    limit: int | None = None
    used: int | None = None
    peak: int | None = None
    kills: int = 0
    """Number of processes ended by the OOM killer."""


@dataclass(frozen=True)
class MemoryUse:
    """Memory of a process in bytes, sampled when an allocation failed."""

    process: int
    """Resident memory; on a system that tells no process its own, the largest so far."""
    bound: int | None
    """The smaller of the process's limits RLIMIT_DATA and RLIMIT_AS; None if neither is set."""
    pod: PodMemory


def memory_use() -> MemoryUse:
    bounds = [resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_DATA, resource.RLIMIT_AS)]
    bound = min((b for b in bounds if b != resource.RLIM_INFINITY), default=None)
    return MemoryUse(_resident_bytes(), bound, pod_memory())


def _resident_bytes() -> int:
    try:
        found = re.search(r"^VmRSS:\s*(\d+) kB", _STATUS.read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:  # not Linux
        found = None
    return int(found[1]) * 1024 if found else peak_resident_bytes()


def exhausted(before: PodMemory, after: PodMemory) -> PodMemory | None:
    """Return `after` if an OOM kill happened between the two samples, else None. Pure."""
    return after if after.kills > before.kills else None


def pod_memory(groups: Path = _GROUPS, own: Path = _OWN) -> PodMemory:
    """Return the memory of this process's cgroup, the cgroup of the container."""
    try:
        version, folder = _group(groups, own.read_text(encoding="utf-8").splitlines())
    except OSError:
        return PodMemory()
    limit, used, peak, kills = (folder / name for name in _FILES[version])
    return PodMemory(_bytes(limit), _bytes(used), _bytes(peak), _kills(kills))


def _group(groups: Path, lines: list[str]) -> tuple[int, Path]:
    """Return the cgroup version, and the folder of this process's memory cgroup. `lines`: lines of /proc/PID/cgroup,
    `number:controllers:path`, see cgroups(7)."""
    paths = {controllers: path for _, controllers, path in (line.split(":", 2) for line in lines)}
    of_memory = [path for controllers, path in paths.items() if "memory" in controllers.split(",")]
    version, top, path = (1, groups / "memory", of_memory[0]) if of_memory else (2, groups, paths.get("", "/"))
    folder = top / path.lstrip("/")
    # A container often sees its own cgroup mounted at the top, while the path is the host's and does not exist there.
    return version, folder if folder.is_dir() else top


def _bytes(path: Path) -> int | None:
    try:
        text = path.read_text(encoding="utf-8").strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() and int(text) < _NO_LIMIT else None


def _kills(path: Path) -> int:
    try:
        found = re.search(r"^oom_kill (\d+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) if found else 0

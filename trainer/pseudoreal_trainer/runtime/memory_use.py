"""Memory use and limits of this process and its pod, as Linux accounts for them."""

import re
import resource
from dataclasses import dataclass
from pathlib import Path

_GROUPS, _OWN, _STATUS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup"), Path("/proc/self/status")
_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.max_usage_in_bytes", "memory.oom_control"),
    2: ("memory.max", "memory.current", "memory.peak", "memory.events"),
}
"""Cgroup version -> its files for limit, current use, peak and OOM kills."""
_NO_LIMIT = 1 << 60
"""Limits from this number of bytes on count as unlimited: cgroup v1 writes a large number, v2 the word max."""


@dataclass(frozen=True)
class PodMemory:
    """Memory of a pod in bytes; None where the system does not tell, or there is no limit."""

    limit: int | None = None
    used: int | None = None
    peak: int | None = None
    kills: int = 0
    """Number of processes ended by the OOM killer."""


@dataclass(frozen=True)
class MemoryUse:
    """Memory of a process in bytes, sampled when an allocation failed."""

    process: int
    bound: int | None
    """Data limit of the process itself (setrlimit); None if there is none."""
    pod: PodMemory


def memory_use() -> MemoryUse:
    bounds = [resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_DATA, resource.RLIMIT_AS)]
    bound = min((b for b in bounds if b != resource.RLIM_INFINITY), default=None)
    found = re.search(r"^VmRSS:\s*(\d+) kB", _STATUS.read_text(), re.MULTILINE)
    return MemoryUse(int(found[1]) * 1024 if found else 0, bound, pod_memory())


def exhausted(before: PodMemory, after: PodMemory) -> PodMemory | None:
    """Return `after` if an OOM kill happened between the two samples, else None. Pure."""
    return after if after.kills > before.kills else None


def pod_memory(groups: Path = _GROUPS, own: Path = _OWN) -> PodMemory:
    """Return the memory of this process's cgroup: its container's."""
    try:
        version, folder = _group(groups, own.read_text().splitlines())
    except OSError:
        return PodMemory()
    limit, used, peak, kills = (folder / name for name in _FILES[version])
    return PodMemory(_bytes(limit), _bytes(used), _bytes(peak), _kills(kills))


def _group(groups: Path, lines: list[str]) -> tuple[int, Path]:
    """Return version and folder of the memory cgroup. `lines` have the form `number:controllers:path`, see
    cgroups(7)."""
    paths = {controllers: path for _, controllers, path in (line.split(":", 2) for line in lines)}
    of_memory = [path for controllers, path in paths.items() if "memory" in controllers.split(",")]
    version, top, path = (1, groups / "memory", of_memory[0]) if of_memory else (2, groups, paths.get("", "/"))
    folder = top / path.lstrip("/")
    # A container often sees its own cgroup mounted at the top, while the path is the host's and does not exist there.
    return version, folder if folder.is_dir() else top


def _bytes(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() and int(text) < _NO_LIMIT else None


def _kills(path: Path) -> int:
    try:
        found = re.search(r"^oom_kill (\d+)$", path.read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) if found else 0

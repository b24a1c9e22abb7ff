"""The cgroup under which all pods of the cluster live: whatever is in it is ours to end."""

from pathlib import Path

from . import processes

ROOT = Path("/sys/fs/cgroup")
NAME = "pseudoreal"


def create() -> None:
    """Makes the cgroup in every hierarchy: the kubelet demands that it exists."""
    for group in _groups():
        group.mkdir(exist_ok=True)
        if not _is_unified():
            _fill_cpuset(group)


def kill() -> None:
    """Ends every process in the cgroup."""
    processes.kill([int(pid) for path in _files("cgroup.procs") for pid in path.read_text().split()])


def delete() -> None:
    """Ends every process in the cgroup, then removes it."""
    kill()
    for group in filter(Path.exists, _groups()):
        for folder in sorted((path for path in group.rglob("*") if path.is_dir()), reverse=True):
            folder.rmdir()
        group.rmdir()


def _fill_cpuset(group: Path) -> None:
    # In version 1 a new cpuset is empty, and nothing can run in it.
    for name in ("cpuset.cpus", "cpuset.mems"):
        if (group / name).exists():
            (group / name).write_text((group.parent / name).read_text())


def _files(name: str) -> list[Path]:
    return [path for group in _groups() for path in group.rglob(name)]


def _groups() -> list[Path]:
    """One folder for each mounted hierarchy: one in all in version 2, one for each controller in version 1."""
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    points = {Path(words[1]) for words in mounts if words[2] in ("cgroup", "cgroup2")}
    return sorted(point / NAME for point in points if point == ROOT or point.parent == ROOT)


def _is_unified() -> bool:
    return (ROOT / "cgroup.controllers").exists()

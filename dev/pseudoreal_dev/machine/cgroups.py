"""Cgroup of all pods of the cluster; every process in the cgroup belongs to the cluster. The second node's cgroup is
below the first node's."""

from pathlib import Path

from pseudoreal_dev.machine import processes

ROOT = Path("/sys/fs/cgroup")
NAME = "pseudoreal"
SECOND = f"{NAME}/second"


def create(name: str) -> None:
    """Create the cgroup in every hierarchy, because the kubelet requires it to exist."""
    for group in _groups(name):
        group.mkdir(exist_ok=True)
        if not _is_unified():
            _fill_cpuset(group)


def kill(name: str = NAME) -> None:
    """Kill every process in the cgroup."""
    files = [path for group in _groups(name) for path in group.rglob("cgroup.procs")]
    processes.kill([int(pid) for path in files for pid in path.read_text().split()])


def delete(name: str = NAME) -> None:
    """Kill every process in the cgroup, then remove the cgroup."""
    kill(name)
    for group in filter(Path.exists, _groups(name)):
        for folder in sorted((path for path in group.rglob("*") if path.is_dir()), reverse=True):
            folder.rmdir()
        group.rmdir()


def _fill_cpuset(group: Path) -> None:
    # In cgroup v1, a new cpuset is empty, and no process can run in it.
    for name in ("cpuset.cpus", "cpuset.mems"):
        if (group / name).exists():
            (group / name).write_text((group.parent / name).read_text())


def _groups(name: str = NAME) -> list[Path]:
    """Return the group's folder in each mounted hierarchy: one in cgroup v2, one per controller in v1."""
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    points = {Path(words[1]) for words in mounts if words[2] in ("cgroup", "cgroup2")}
    return sorted(point / name for point in points if point == ROOT or point.parent == ROOT)


def _is_unified() -> bool:
    return (ROOT / "cgroup.controllers").exists()

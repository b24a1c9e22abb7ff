"""Pods of the cluster as seen from this machine: processes, and folders of volumes."""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pseudoreal_dev.cluster.kubectl import Kubernetes
from pseudoreal_dev.demo.volumes import create_host_volume
from pseudoreal_dev.machine import cgroups, paths, processes, shell

RANK = "-m pseudoreal_trainer.cli.rank"
"""Part of the command line of a rank."""
TORCHRUN = "pt_elastic"
"""Process name of torchrun: the process is forked and keeps the command line of another program."""
_HUNGRY = """
import sys
from pathlib import Path

group, limit, use, rank = map(Path, sys.argv[1:])
(group / "cgroup.procs").write_text("0")
limit.write_text(use.read_text())
held = []
while rank.exists():
    held.append(bytearray(2**20))
"""
"""Program for the OOM killer: joins a cgroup, sets its memory limit to its current use, and allocates memory until a
rank is gone.

The program allocates in a loop, because the kernel first frees the cgroup's page cache, which may be large.
"""


def volume(claim: str) -> Path:
    """Return the folder of this machine behind a claim of the local cluster."""
    return paths.cache() / "volumes" / claim


def make_volume(kubernetes: Kubernetes, claim: str) -> Path:
    """Create an empty volume with its claim; return the volume's folder on this machine."""
    kubernetes.run("delete", "persistentvolumeclaim", claim, "--namespace=default", "--ignore-not-found")
    folder = create_host_volume(kubernetes, claim, "1Gi")
    spec = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}}
    metadata = {"name": claim, "namespace": "default"}
    kubernetes.apply({"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata, "spec": spec})
    return folder


def tell(pod: Mapping[str, Any], number: signal.Signals, part: str) -> None:
    """Send a signal to the pod's processes with `part` in their command line, or as their name."""
    for pid in _processes(pod, part):
        os.kill(pid, number)


def starve(pod: Mapping[str, Any]) -> None:
    """Make the kernel's OOM killer end a rank of the pod."""
    ranks = _processes(pod, RANK)
    for pid in ranks:
        # The OOM killer chooses the highest score.
        Path(f"/proc/{pid}/oom_score_adj").write_text("1000")
    group = _memory_group(ranks[0])
    unified = (group / "memory.max").exists()
    files = ("memory.max", "memory.current") if unified else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    # Not checked: where the kernel kills all processes of the cgroup, it kills the started program too.
    arguments = [str(group), *(str(group / name) for name in files), f"/proc/{ranks[0]}"]
    subprocess.run([sys.executable, "-c", _HUNGRY, *arguments], check=False)


def _memory_group(pid: int) -> Path:
    lines = [line.split(":", 2) for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines()]
    for _, controllers, path in lines:
        if "memory" in controllers.split(","):
            return cgroups.ROOT / "memory" / path.lstrip("/")
    return cgroups.ROOT / next(path for number, _, path in lines if number == "0").lstrip("/")


def bound_files(pod: Mapping[str, Any], size: int) -> None:
    """Limit the files of the pod's ranks to `size` bytes: writing a checkpoint then fails."""
    for pid in _processes(pod, RANK):
        user = str(Path(f"/proc/{pid}").stat().st_uid)
        # As the owner of the process: root may lack the capability.
        who = ["setpriv", "--reuid", user, "--regid", user, "--clear-groups"]
        shell.output([*who, "prlimit", f"--pid={pid}", f"--fsize={size}:{size}"])


def has_pending(pod: Mapping[str, Any], number: signal.Signals, part: str) -> bool:
    """Return whether the signal is pending in all processes of the pod with `part` in their command line."""
    return all(_pending(pid) & 1 << (number - 1) for pid in _processes(pod, part))


def _pending(pid: int) -> int:
    status = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(status["ShdPnd"], 16)


def _processes(pod: Mapping[str, Any], part: str) -> list[int]:
    lines = processes.command_lines()
    found = [pid for pid, words in lines if (part in " ".join(words) or part == _name(pid)) and _is_of(pid, pod)]
    assert found, f"pod {pod['metadata']['name']} has a process with {part} in its command line, or of that name"
    return found


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _is_of(pid: int, pod: Mapping[str, Any]) -> bool:
    """Return whether a process is in the cgroup of one of the pod's containers."""
    containers = [status.get("containerID", "") for status in pod["status"].get("containerStatuses", [])]
    names = [container.removeprefix("containerd://") for container in containers if container]
    try:
        groups = Path(f"/proc/{pid}/cgroup").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return any(name in groups for name in names)

"""What the cluster's pods are on this machine: processes, and folders of volumes."""

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pseudoreal_dev.cluster.kubectl import Kubernetes
from pseudoreal_dev.demo.example import create_host_volume
from pseudoreal_dev.machine import paths, processes

RANK = "-m pseudoreal_trainer.worker"
"""In the command line of a rank; not in that of torchrun, which says --module."""


def volume(claim: str) -> Path:
    """The folder of this machine behind a claim of the local cluster."""
    return paths.cache() / "volumes" / claim


def make_volume(kubernetes: Kubernetes, claim: str) -> Path:
    """An empty volume, its claim, and the folder of this machine behind it."""
    kubernetes.run("delete", "persistentvolumeclaim", claim, "--namespace=default", "--ignore-not-found")
    folder = create_host_volume(kubernetes, claim, "1Gi")
    spec = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}}
    metadata = {"name": claim, "namespace": "default"}
    kubernetes.apply({"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata, "spec": spec})
    return folder


def tell(pod: Mapping[str, Any], number: signal.Signals, part: str) -> None:
    """Sends a signal to the processes of a pod that have `part` in their command line."""
    for pid in _processes(pod, part):
        os.kill(pid, number)


def has_pending(pod: Mapping[str, Any], number: signal.Signals, part: str) -> bool:
    """Whether all these processes have been sent a signal that they have not taken yet."""
    return all(_pending(pid) & 1 << (number - 1) for pid in _processes(pod, part))


def _pending(pid: int) -> int:
    status = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(status["ShdPnd"], 16)


def _processes(pod: Mapping[str, Any], part: str) -> list[int]:
    found = [pid for pid, words in processes.command_lines() if part in " ".join(words) and _is_of(pid, pod)]
    assert found, f"pod {pod['metadata']['name']} has a process with {part} in its command line"
    return found


def _is_of(pid: int, pod: Mapping[str, Any]) -> bool:
    """Whether a process is in the cgroup of one of the pod's containers."""
    containers = [status.get("containerID", "") for status in pod["status"].get("containerStatuses", [])]
    names = [container.removeprefix("containerd://") for container in containers if container]
    try:
        groups = Path(f"/proc/{pid}/cgroup").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return any(name in groups for name in names)

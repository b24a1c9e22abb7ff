"""A real scheduler on the test API server, fake nodes without machines, and the placement of pods."""

import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml
from kubernetes import client

from tests.support.cluster import Job
from tests.support.patience import wait_for

CLAIM = "checkpoints"
PLAIN_SCHEDULER = "plain"
"""Name of Kubernetes' own scheduler in the tests; pods without this name stay without a node."""


@contextmanager
def running_scheduler(
    program: Path, folder: Path, kubeconfig: Path, profile: dict[str, Any], *options: str
) -> Iterator[None]:
    """Run the scheduler with its log in the folder. It schedules only pods naming the profile's scheduler."""
    config = {
        "apiVersion": "kubescheduler.config.k8s.io/v1",
        "kind": "KubeSchedulerConfiguration",
        "leaderElection": {"leaderElect": False},
        "clientConnection": {"kubeconfig": str(kubeconfig)},
        "profiles": [profile],
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    command = [program, f"--config={folder / 'config.yaml'}", "--secure-port=0", *options]
    with (folder / "log").open("wb") as log:
        words = ["setpriv", "--pdeathsig", "KILL", *map(str, command)]
        process = subprocess.Popen(words, stdout=log, stderr=log, start_new_session=True)
    yield
    ended = process.poll()
    process.kill()
    process.wait()
    assert ended is None, (folder / "log").read_text()


@contextmanager
def nodes_for_one_pod_each(
    core: client.CoreV1Api, labels: Mapping[str, dict[str, str]], **devices: str
) -> Iterator[None]:
    """Create ready nodes, each for one pod. `labels` maps node names to labels, `devices` resource names to amounts per
    node."""
    room = {"cpu": "8", "memory": "16Gi", "ephemeral-storage": "100Gi", "pods": "1"} | devices
    for name, own in labels.items():
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        ready = {"type": "Ready", "status": "True", "reason": "Test", "message": "", "lastHeartbeatTime": now}
        status = {"capacity": room, "allocatable": room, "conditions": [ready | {"lastTransitionTime": now}]}
        node: Any = {"metadata": {"name": name, "labels": own}, "status": status}
        core.create_node(node)

    def are_ready() -> bool:
        found: list[Any] = [core.read_node(name) for name in labels]
        return not any(node.spec.taints for node in found)

    wait_for("nodes that are ready", are_ready)
    yield
    for name in labels:
        core.delete_node(name)


@contextmanager
def bound_claim(core: client.CoreV1Api, namespace: str) -> Iterator[None]:
    """Bind the claim for checkpoints to a volume: the scheduler places pods only after their claims are bound."""
    common = {"accessModes": ["ReadWriteMany"], "storageClassName": ""}
    target = {"namespace": namespace, "name": CLAIM}
    source = {"hostPath": {"path": "/nowhere"}, "capacity": {"storage": "1Gi"}, "claimRef": target}
    volume: Any = {"metadata": {"name": namespace}, "spec": common | source}
    core.create_persistent_volume(volume)
    wish = {"volumeName": namespace, "resources": {"requests": {"storage": "1Gi"}}}
    claim: Any = {"metadata": {"name": CLAIM}, "spec": common | wish}
    core.create_namespaced_persistent_volume_claim(namespace, claim)

    def is_bound() -> bool:
        found: Any = core.read_namespaced_persistent_volume_claim(CLAIM, namespace)
        return bool(found.status.phase == "Bound")

    wait_for("the claim", is_bound)
    yield
    core.delete_persistent_volume(namespace)


def placed(job: Job) -> int:
    return sum(bool(pod["spec"].get("nodeName")) for pod in job.alive_pods())


def said(jobs: Sequence[Job]) -> list[Any]:
    """Return the scheduling result of each pod."""
    return [
        (pod["metadata"]["name"], pod["spec"].get("nodeName"), pod["status"].get("conditions"))
        for job in jobs
        for pod in job.alive_pods()
    ]

"""Two jobs of four pods on six nodes, with the real scheduler of scheduler-plugins: a gang has all nodes or none."""

import subprocess
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes import client
from pseudoreal_dev.cluster.control_plane import ControlPlane
from pseudoreal_dev.neighbours.coscheduling import coscheduling

from tests.support.cluster import Cluster, Job
from tests.support.kubectl import Kubectl
from tests.support.patience import wait_for

pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.usefixtures("shared_operator", "scheduler")]

SCHEDULER, PODS, NODES = "gangs", 4, 6
CLAIM = "checkpoints"


@pytest.fixture(scope="module")
def scheduler(control_plane: ControlPlane, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The scheduler with its own definition of PodGroups. Pods name it: to others it does nothing."""
    folder, built, kubectl = tmp_path_factory.mktemp("scheduler"), coscheduling(), Kubectl(control_plane.kubeconfig)
    kubectl.said("apply", "--server-side", "--force-conflicts", "-f", str(built.definition))
    wait_for("PodGroups", lambda: kubectl("get", "podgroups.scheduling.x-k8s.io").returncode == 0)
    _, kubeconfig = control_plane.user(SCHEDULER, ["system:masters"])
    (folder / "config.yaml").write_text(yaml.safe_dump(_config(kubeconfig)))
    # A gang that was refused is looked at again when there are new pods, or after this time (usually five minutes),
    # however much room there is meanwhile.
    again = "--pod-max-in-unschedulable-pods-duration=1s"
    command = [built.program, f"--config={folder / 'config.yaml'}", "--secure-port=0", again]
    with (folder / "log").open("wb") as log:
        words = ["setpriv", "--pdeathsig", "KILL", *map(str, command)]
        process = subprocess.Popen(words, stdout=log, stderr=log, start_new_session=True)
    yield
    ended = process.poll()
    process.kill()
    process.wait()
    assert ended is None, (folder / "log").read_text()


def _config(kubeconfig: Path) -> dict[str, Any]:
    """Coscheduling as its project's own example has it."""
    name = {"name": "Coscheduling"}
    plugins = {"multiPoint": {"enabled": [name]}, "queueSort": {"enabled": [name], "disabled": [{"name": "*"}]}}
    waiting = {**name, "args": {"permitWaitingTimeSeconds": 10}}
    return {
        "apiVersion": "kubescheduler.config.k8s.io/v1",
        "kind": "KubeSchedulerConfiguration",
        "leaderElection": {"leaderElect": False},
        "clientConnection": {"kubeconfig": str(kubeconfig)},
        "profiles": [{"schedulerName": SCHEDULER, "plugins": plugins, "pluginConfig": [waiting]}],
    }


@pytest.fixture
def nodes(cluster: Cluster) -> Iterator[dict[str, str]]:
    """Nodes with room for one pod each: the labels by which pods find them."""
    core, labels = client.CoreV1Api(cluster.api), {"test": cluster.namespace}
    room = {"cpu": "8", "memory": "16Gi", "ephemeral-storage": "100Gi", "pods": "1"}
    names = [f"{cluster.namespace}-{number}" for number in range(NODES)]
    for name in names:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        ready = {"type": "Ready", "status": "True", "reason": "Test", "message": "", "lastHeartbeatTime": now}
        status = {"capacity": room, "allocatable": room, "conditions": [ready | {"lastTransitionTime": now}]}
        node: Any = {"metadata": {"name": name, "labels": labels}, "status": status}
        core.create_node(node)
    _bind_claim(core, cluster.namespace)

    def are_ready() -> bool:
        found: list[Any] = [core.read_node(name) for name in names]
        return not any(node.spec.taints for node in found)

    wait_for("nodes that are ready", are_ready)
    yield labels
    for name in names:
        core.delete_node(name)
    core.delete_persistent_volume(cluster.namespace)


def _bind_claim(core: client.CoreV1Api, namespace: str) -> None:
    """The volume of checkpoints: pods wait for it before they look for a node."""
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


def create(cluster: Cluster, name: str, policy: str, nodes: dict[str, str]) -> Job:
    spec = {"schedulerName": SCHEDULER, "nodeSelector": nodes}
    gang = {"policy": policy} | ({"timeoutSeconds": 5} if policy != "None" else {})
    return cluster.create(
        name,
        spec__phases__0__workers=PODS,
        spec__pod={"template": {"spec": spec}},
        spec__scheduling={"gang": gang},
        spec__checkpoint__storage__volume={"claimName": CLAIM},
    )


def remove(cluster: Cluster, job: Job) -> None:
    """Deletes a job, and its pods as the kubelets of their nodes do when these have ended."""
    pods, core = job.alive_pods(), client.CoreV1Api(cluster.api)
    cluster.delete_job(job.name)
    wait_for("the end of its Jobs", lambda: not job.child_jobs())
    for pod in pods:
        core.delete_namespaced_pod(pod["metadata"]["name"], cluster.namespace, grace_period_seconds=0)


def placed(job: Job) -> int:
    return sum(bool(pod["spec"].get("nodeName")) for pod in job.alive_pods())


def refused(job: Job) -> int:
    """Number of its pods for which the scheduler has said that there is no place."""
    conditions = [c for pod in job.alive_pods() for c in pod["status"].get("conditions", [])]
    return sum(c["type"] == "PodScheduled" and c["status"] == "False" for c in conditions)


def said(jobs: list[Job]) -> list[Any]:
    """What the scheduler has said of each pod."""
    return [
        (pod["metadata"]["name"], pod["spec"].get("nodeName"), pod["status"].get("conditions"))
        for job in jobs
        for pod in job.alive_pods()
    ]


def all_are_looked_at(jobs: list[Job]) -> bool:
    return all(placed(job) + refused(job) == PODS for job in jobs)


def test_a_gang_has_all_of_its_nodes_or_none(cluster: Cluster, nodes: dict[str, str]) -> None:
    jobs = [create(cluster, name, "SchedulerPlugins", nodes) for name in ("first", "second")]
    by_name = {job.name: job for job in jobs}

    def winner() -> Job | None:
        return next((job for job in jobs if placed(job) == PODS), None)

    first = wait_for("all pods of a job", winner, lambda: said(jobs))
    other = next(job for name, job in by_name.items() if name != first.name)
    wait_for("the other one's turn", lambda: refused(other) == PODS, lambda: said(jobs))
    assert placed(other) == 0, "it holds no node"
    remove(cluster, first)
    wait_for("all pods of the other one", lambda: placed(other) == PODS, lambda: said([other]))


def test_without_a_gang_each_holds_what_the_other_one_needs(cluster: Cluster, nodes: dict[str, str]) -> None:
    """What gangs are for: all nodes are taken, and not both jobs have all of theirs."""
    jobs = [create(cluster, name, "None", nodes) for name in ("first", "second")]
    wait_for("the scheduler's look at all", lambda: all_are_looked_at(jobs), lambda: said(jobs))
    assert sum(map(placed, jobs)) == NODES, said(jobs)
    assert 0 < min(map(placed, jobs)) < PODS

"""Gang scheduling of two jobs with four pods each on six nodes, with the real scheduler of scheduler-plugins: all nodes
or none."""

from collections.abc import Iterator
from typing import Any

import pytest
from kubernetes import client
from pseudoreal_dev.cluster.control_plane import ControlPlane
from pseudoreal_dev.neighbours.coscheduling import coscheduling

from tests.support.cluster import Cluster, Job
from tests.support.kubectl import Kubectl
from tests.support.patience import wait_for
from tests.support.schedulers import CLAIM, bound_claim, nodes_for_one_pod_each, placed, running_scheduler, said

pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.usefixtures("shared_operator", "scheduler")]

SCHEDULER, PODS, NODES = "gangs", 4, 6


@pytest.fixture(scope="module")
def scheduler(control_plane: ControlPlane, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The scheduler, with its own PodGroup definition."""
    folder, built, kubectl = tmp_path_factory.mktemp("scheduler"), coscheduling(), Kubectl(control_plane.kubeconfig)
    kubectl.said("apply", "--server-side", "--force-conflicts", "-f", str(built.definition))
    wait_for("PodGroups", lambda: kubectl("get", "podgroups.scheduling.x-k8s.io").returncode == 0)
    _, kubeconfig = control_plane.user(SCHEDULER, ["system:masters"])
    # A gang that was refused is looked at again when there are new pods, or after this time (usually five minutes),
    # however much room there is meanwhile.
    again = "--pod-max-in-unschedulable-pods-duration=1s"
    with running_scheduler(built.program, folder, kubeconfig, _profile(), again):
        yield


def _profile() -> dict[str, Any]:
    """Return the coscheduling profile of the project's own example."""
    name = {"name": "Coscheduling"}
    plugins = {"multiPoint": {"enabled": [name]}, "queueSort": {"enabled": [name], "disabled": [{"name": "*"}]}}
    waiting = {**name, "args": {"permitWaitingTimeSeconds": 10}}
    return {"schedulerName": SCHEDULER, "plugins": plugins, "pluginConfig": [waiting]}


@pytest.fixture
def nodes(cluster: Cluster) -> Iterator[dict[str, str]]:
    """Nodes for one pod each; the value is the label set for the pods' node selector."""
    core, labels = client.CoreV1Api(cluster.api), {"test": cluster.namespace}
    names = [f"{cluster.namespace}-{number}" for number in range(NODES)]
    with nodes_for_one_pod_each(core, dict.fromkeys(names, labels)), bound_claim(core, cluster.namespace):
        yield labels


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
    """Delete a job, then its pods, like the kubelets of their nodes after the pods have ended."""
    pods, core = job.alive_pods(), client.CoreV1Api(cluster.api)
    cluster.delete_job(job.name)
    wait_for("the end of its Jobs", lambda: not job.child_jobs())
    for pod in pods:
        core.delete_namespaced_pod(pod["metadata"]["name"], cluster.namespace, grace_period_seconds=0)


def refused(job: Job) -> int:
    """Return the number of pods reported as unschedulable."""
    conditions = [c for pod in job.alive_pods() for c in pod["status"].get("conditions", [])]
    return sum(c["type"] == "PodScheduled" and c["status"] == "False" for c in conditions)


def all_are_looked_at(jobs: list[Job]) -> bool:
    return all(placed(job) + refused(job) == PODS for job in jobs)


def test_a_gang_is_scheduled_as_a_whole_or_waits(cluster: Cluster, nodes: dict[str, str]) -> None:
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


def test_without_gang_scheduling_two_jobs_deadlock(cluster: Cluster, nodes: dict[str, str]) -> None:
    """The problem solved by gangs: all nodes are taken, and neither job has all of its pods placed."""
    jobs = [create(cluster, name, "None", nodes) for name in ("first", "second")]
    wait_for("the scheduler's look at all", lambda: all_are_looked_at(jobs), lambda: said(jobs))
    assert sum(map(placed, jobs)) == NODES, said(jobs)
    assert 0 < min(map(placed, jobs)) < PODS

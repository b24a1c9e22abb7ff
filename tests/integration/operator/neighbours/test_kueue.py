"""A real Kueue admits, holds, preempts and reclaims the Jobs of a job, and Kueue alone writes its own fields."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client
from pseudoreal_dev.cluster.control_plane import ControlPlane

from tests.support import kueue
from tests.support.cluster import Cluster, Job, complete_stage
from tests.support.kueue import Kueue
from tests.support.names import bare
from tests.support.patience import wait_for
from tests.support.writers import verbs_on_jobs, writers_of

pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.usefixtures("shared_operator")]

GPU, FLAVOR, QUEUE = "nvidia.com/gpu", "gpu-nodes", "gpus"
LABELS = {"pool": "gpu"}
TAINT = {"key": "only", "value": "gpus", "effect": "NoSchedule"}
LOW, HIGH = "low", "high"


@pytest.fixture(scope="module")
def queues(
    control_plane: ControlPlane, admin: client.ApiClient, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Kueue]:
    with kueue.running(control_plane, admin, tmp_path_factory.mktemp("kueue")) as running:
        running.flavor(FLAVOR, LABELS, taint=TAINT)
        running.priority(LOW, 1)
        running.priority(HIGH, 100)
        yield running


def queue(queues: Kueue, cluster: Cluster, gpus: int, name: str = QUEUE, **fields: Any) -> str:
    """Create a queue of the namespace with `gpus` GPUs; return the name of its ClusterQueue."""
    behind = f"{cluster.namespace}-{name}"
    queues.cluster_queue(behind, FLAVOR, GPU, gpus, **fields)
    queues.local_queue(cluster.namespace, name, behind)
    return behind


def create(cluster: Cluster, name: str, **scheduling: Any) -> Job:
    """Create a job with a first phase on one GPU and a second phase on two."""
    gpu = {"limits": {GPU: "1"}}
    terms = {"queue": QUEUE} | scheduling
    return cluster.create(name, spec__scheduling=terms, spec__phases__0__resources=gpu, spec__phases__1__resources=gpu)


def wait_in_queue(job: Job) -> None:
    job.wait("the queue", lambda status: status.state == "Queued")
    assert job.condition("Progressing")["reason"] == "Queued"


def wait_for_training(job: Job, phase: int = 0) -> None:
    job.wait("training", lambda status: len(status.phases) > phase and status.phases[phase].state == "Training")


def child(cluster: Cluster, name: str) -> dict[str, Any]:
    """Wait for a child Job with this bare name, and return it."""

    def found() -> dict[str, Any] | None:
        jobs = cluster.list("apis/batch/v1 jobs")
        return next((job for job in jobs if bare(job["metadata"]["name"]) == name), None)

    return wait_for(name, found)


def workloads(cluster: Cluster) -> list[dict[str, Any]]:
    return cluster.list(f"apis/{kueue.GROUP}/{kueue.VERSION} workloads")


def test_each_phase_waits_for_its_own_quota_and_a_delink_for_none(
    queues: Kueue, cluster: Cluster, audit_log: Path
) -> None:
    behind, job = queue(queues, cluster, 0), create(cluster, "llm")
    wait_in_queue(job)
    pseudo = child(cluster, "llm-pseudo-e1")
    assert pseudo["spec"]["suspend"] is True
    assert job.children("api/v1 pods") == []
    assert "admits it" in job.condition("Progressing")["message"]

    queues.set_quota(behind, 1)
    job.run("llm-pseudo-e1")
    wait_for_training(job)
    admitted = child(cluster, "llm-pseudo-e1")
    pod = admitted["spec"]["template"]["spec"]
    assert pod["nodeSelector"].items() >= LABELS.items()
    assert any(toleration.get("key") == TAINT["key"] for toleration in pod["tolerations"])
    assert writers_of(admitted, "spec", "suspend") == {kueue.MANAGER}
    for field in ("nodeSelector", "tolerations"):
        assert writers_of(admitted, "spec", "template", "spec", field) == {kueue.MANAGER}

    complete_stage(job, "pseudo")
    # The quota of one GPU is taken by nobody, but the delink does not ask for it.
    delink = child(cluster, "llm-real-delink-e1")
    assert not delink["spec"].get("suspend")
    complete_stage(job, "delink")
    wait_in_queue(job)
    real = child(cluster, "llm-real-e1")
    (workload,) = [one for one in workloads(cluster) if one["metadata"]["ownerReferences"][0]["name"] == name_of(real)]
    assert [one["count"] for one in workload["spec"]["podSets"]] == [2]

    queues.set_quota(behind, 2)
    complete_stage(job, "real")
    job.wait("the end", lambda status: status.state == "Complete")
    assert (job.status.restarts, job.status.disruptions) == (0, [])
    assert len(workloads(cluster)) == 2, "of the two phases; the delink has none"
    assert verbs_on_jobs(audit_log, cluster.namespace) <= {"create", "delete", "get", "list", "watch"}


def name_of(body: dict[str, Any]) -> str:
    return str(body["metadata"]["name"])


def of_priorities(queues: Kueue, cluster: Cluster) -> tuple[dict[str, Any], dict[str, Any]]:
    """One GPU for two jobs of different priority."""
    queue(queues, cluster, 1, preemption={"withinClusterQueue": "LowerPriority"})
    return {"workloadPriorityClassName": LOW}, {"workloadPriorityClassName": HIGH}


def of_a_cohort(queues: Kueue, cluster: Cluster) -> tuple[dict[str, Any], dict[str, Any]]:
    """A queue borrows the GPU of another queue; the owner reclaims it."""
    cohort = {"cohortName": cluster.namespace}
    queue(queues, cluster, 0, "borrower", **cohort)
    queue(queues, cluster, 1, "owner", **cohort, preemption={"reclaimWithinCohort": "Any"})
    return {"queue": "borrower"}, {"queue": "owner"}


@pytest.mark.parametrize("terms", [of_priorities, of_a_cohort], ids=["preempted", "reclaimed"])
def test_a_preempted_job_resumes_later_without_a_counted_restart(queues: Kueue, cluster: Cluster, terms: Any) -> None:
    weak, strong = terms(queues, cluster)
    first = create(cluster, "first", **weak)
    first.run("first-pseudo-e1")
    wait_for_training(first)

    second = create(cluster, "second", **strong)
    wait_in_queue(first)
    assert first.event("Preempted")
    assert first.children("api/v1 pods") == [] or first.alive_pods() == []
    second.run("second-pseudo-e1")
    wait_for_training(second)
    assert first.status.state == "Queued"

    cluster.delete_job("second")
    first.run("first-pseudo-e1")
    wait_for_training(first)
    status = first.wait("the end of the wait", lambda status: status.queued_since is None)
    assert (status.execution, status.restarts, status.disruptions) == (1, 0, [])
    assert "Failed" not in first.reasons()


def test_queue_and_priority_can_change_while_a_job_is_suspended(queues: Kueue, cluster: Cluster) -> None:
    queue(queues, cluster, 0)
    queue(queues, cluster, 1, "other")
    job = create(cluster, "llm")
    wait_in_queue(job)
    job.suspend(True)
    job.wait("the suspension", lambda status: status.state == "Suspended")
    wait_for("the end of the Workload", lambda: not workloads(cluster))
    change = {"scheduling": {"queue": "other", "workloadPriorityClassName": HIGH}, "suspend": False}
    cluster.patch_job("llm", {"spec": change})
    (pod,) = wait_for("a pod", lambda: job.alive_pods())
    assert pod["status"]["phase"] == "Pending"
    (workload,) = workloads(cluster)
    assert workload["spec"]["queueName"] == "other"
    assert workload["spec"]["priority"] == 100


def test_a_delink_waits_if_the_chart_says_that_delinks_are_queued(queues: Kueue, cluster: Cluster) -> None:
    queue(queues, cluster, 1)
    job = create(cluster, "llm", queueDelink=True)
    complete_stage(job, "pseudo")
    delink = child(cluster, "llm-real-delink-e1")
    wait_for("its Workload", lambda: len(workloads(cluster)) == 2)
    assert writers_of(delink, "spec", "suspend"), "it was made suspended"
    complete_stage(job, "delink")
    assert writers_of(child(cluster, "llm-real-delink-e1"), "spec", "suspend") == {kueue.MANAGER}

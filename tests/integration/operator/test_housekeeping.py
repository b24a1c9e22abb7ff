"""Housekeeping: ownership, deletion, no idle writes, health."""

import time

import pytest

from tests.support.cluster import CHILD_PATHS, Cluster, Job
from tests.support.kubectl import Kubectl
from tests.support.operator_process import Operator
from tests.support.patience import wait_for

pytestmark = pytest.mark.integration


def _managers(body: dict[str, object]) -> set[tuple[str, str]]:
    metadata = body["metadata"]
    assert isinstance(metadata, dict)
    return {(entry["manager"], entry["operation"]) for entry in metadata["managedFields"]}


@pytest.mark.usefixtures("shared_operator")
def test_children_are_made_and_owned(cluster: Cluster) -> None:
    job = cluster.create("owned")
    job.pods("owned-pseudo-e1")
    uid = job.body["metadata"]["uid"]
    for path in CHILD_PATHS[:3]:
        (child,) = job.children(path)
        assert ("pseudoreal-operator", "Update") in _managers(child)
        (owner,) = child["metadata"]["ownerReferences"]
        assert (owner["uid"], owner["controller"], owner["blockOwnerDeletion"]) == (uid, True, True)
    job.wait("the start", lambda status: status.current_phase == "pseudo")
    assert ("pseudoreal-operator", "Apply") in _managers(job.body)
    left = job.body["metadata"].keys() & {"finalizers", "annotations"}
    assert not left, "kopf writes nothing to a job, and it can be deleted at any time"


@pytest.mark.usefixtures("shared_operator")
def test_describe_shows_the_events_in_order(cluster: Cluster, kubectl: Kubectl) -> None:
    job = cluster.create("described")
    job.run("described-pseudo-e1")
    job.wait("training", lambda status: status.current_phase == "pseudo")
    events = kubectl.said("-n", cluster.namespace, "describe", "prj", "described").split("Events:")[1]
    assert events.index("Accepted") < events.index("PhaseStarted")
    assert "pseudoreal-operator" in events


@pytest.mark.usefixtures("shared_operator")
def test_nothing_is_written_while_nothing_happens(cluster: Cluster) -> None:
    job = cluster.create("quiet")
    job.run("quiet-pseudo-e1")
    job.wait("training", lambda status: status.replicas.ready == 1)
    wait_for("the Job's count", lambda: job.children("apis/batch/v1 jobs")[0]["status"].get("ready") == 1)

    def versions() -> list[str]:
        children = [child for path in CHILD_PATHS for child in job.children(path)]
        return [body["metadata"]["resourceVersion"] for body in [job.body, *children]]

    before, events = versions(), job.reasons()
    deadline = time.monotonic() + 6.0
    while time.monotonic() < deadline:
        assert versions() == before
        time.sleep(0.5)
    assert job.reasons() == events


@pytest.mark.usefixtures("shared_operator")
def test_deleting_a_job_deletes_its_children(cluster: Cluster) -> None:
    job = cluster.create("short-lived")
    job.run("short-lived-pseudo-e1")
    cluster.delete_job(job.name)
    assert cluster.find(job.name) is None, "nothing holds it"
    _wait_for_no_children(job)


@pytest.mark.usefixtures("shared_operator")
def test_a_claim_is_made_for_a_job_and_goes_with_it(cluster: Cluster) -> None:
    job = cluster.create("claiming", spec__checkpoint={"storage": {"volume": {"retentionPolicy": "Delete"}}})
    job.pods("claiming-pseudo-e1")
    (made,) = cluster.list("api/v1 persistentvolumeclaims")
    assert made["metadata"]["name"] == "claiming-checkpoints"
    assert made["spec"]["resources"]["requests"]["storage"], "the operator chose the size"
    cluster.delete_job(job.name)
    # Nobody takes the finalizer of a claim off that a pod without a node may use.
    wait_for("the deletion", lambda: "deletionTimestamp" in _claim(cluster))


def _claim(cluster: Cluster) -> dict[str, object]:
    found = cluster.list("api/v1 persistentvolumeclaims")
    return found[0]["metadata"] if found else {"deletionTimestamp": "before"}


@pytest.mark.usefixtures("shared_operator")
def test_a_job_that_has_ended_is_deleted_when_its_time_is_over(cluster: Cluster) -> None:
    job = cluster.create("transient", spec__deadlines={"ttlSecondsAfterFinished": 1})
    (pod,) = job.run("transient-pseudo-e1")
    job.end(pod, "InvalidJob", message="no corpus")
    wait_for("the deletion", lambda: cluster.find("transient") is None, lambda: cluster.find("transient"))


@pytest.mark.usefixtures("shared_operator")
def test_a_job_created_anew_waits_for_the_children_of_the_old_one(cluster: Cluster) -> None:
    old = cluster.create("reborn")
    old.run("reborn-pseudo-e1")
    first = old.children("apis/batch/v1 jobs")[0]["metadata"]["uid"]
    cluster.delete_job("reborn")
    wait_for("the deletion", lambda: cluster.find("reborn") is None)
    new = cluster.create("reborn")
    new.wait("the start", lambda status: status.current_phase == "pseudo")
    job = wait_for("the new child", lambda: next(iter(new.children("apis/batch/v1 jobs")), None))
    assert job["metadata"]["uid"] != first
    assert job["metadata"]["labels"]["pseudoreal.dev/job-uid"] == new.body["metadata"]["uid"]


def test_a_job_can_be_deleted_while_the_operator_is_away(cluster: Cluster, operator: Operator) -> None:
    job = cluster.create("left-behind")
    job.pods("left-behind-pseudo-e1")
    operator.kill()
    cluster.delete_job(job.name)
    assert cluster.find(job.name) is None
    _wait_for_no_children(job)
    operator.start()
    cluster.create("left-behind").pods("left-behind-pseudo-e1")


def test_health_says_whether_all_tasks_run(cluster: Cluster, operator: Operator) -> None:
    # Its jobs are seen only once all watches run: those of jobs, child Jobs and pods, and that of silence.
    cluster.create("seen").pods("seen-pseudo-e1")
    expected = {"watchers": 4, "refused_statuses": 0, "internal_errors": 0, "lost_events": 0, "dead_tasks": []}
    said = operator.health()
    assert said | expected == said
    assert {"watch of jobs", "list of jobs", "worker of passes 0", "poster of events 0"} <= {*said["tasks"]}


def _wait_for_no_children(job: Job) -> None:
    def gone() -> bool:
        return not any(job.children(path) for path in CHILD_PATHS)

    # The garbage collector looks for new kinds, such as that of the owner, every 30 s.
    wait_for("the end of the children", gone, lambda: [job.children(path) for path in CHILD_PATHS])

"""Faults on a real API server, and the operator's reaction."""

from collections import Counter

import pytest

from tests.support.cluster import CHILD_PATHS, Cluster, complete_stage
from tests.support.patience import wait_for

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("shared_operator")]

NO_BACKOFF = {"spec__restart": {"backoffSeconds": 0, "maxRestarts": 1}}


def test_a_failed_worker_restarts_all_workers_and_counts(cluster: Cluster) -> None:
    job = cluster.create("wounded", **NO_BACKOFF)
    complete_stage(job, "pseudo")
    complete_stage(job, "delink")
    pods = job.run("wounded-real-e1", 2)
    job.end(pods[1], "Failed", message="the disk is full", checkpoint=None)
    # The Job controller deletes the partner; a kubelet would let it save first.
    status = job.wait("the second execution", lambda status: status.execution == 2 and status.restart_after is None)
    assert status.restarts == 1
    complete_stage(job, "real", execution=2)
    job.wait("the end", lambda status: status.state == "Complete")
    failure = job.event("ExecutionFailed")
    assert failure["type"] == "Warning"
    assert (
        f"Pod {pods[1]['metadata']['name']} (worker 1) ended with exit code 1: the disk is full." in failure["message"]
    )
    job.event("Completed")
    assert job.reasons().count("PhaseStarted") == 2


def test_a_disrupted_worker_restarts_all_without_counting(cluster: Cluster) -> None:
    job = cluster.create("polite", **NO_BACKOFF)
    (pod,) = job.run("polite-pseudo-e1")
    job.end(pod, "Yielded", step=7, checkpoint="pseudo-7")
    job.pods("polite-pseudo-e2")
    status = job.wait("the second execution", lambda status: status.execution == 2 and status.restart_after is None)
    assert status.restarts == 0
    assert status.checkpoint
    assert status.checkpoint.latest == "pseudo-7"


def test_a_job_fails_when_its_restarts_are_used_up(cluster: Cluster) -> None:
    job = cluster.create("hopeless", **NO_BACKOFF)
    for execution in (1, 2):
        (pod,) = job.run(f"hopeless-pseudo-e{execution}")
        job.end(pod, exit_code=139)
    job.wait("the end", lambda status: status.state == "Failed")
    failed = job.condition("Failed")
    assert failed["reason"] == "RestartsExhausted"
    assert "exit code 139" in failed["message"]
    assert "kubectl logs" in failed["message"]
    assert job.child_jobs() == ["hopeless-pseudo-e1", "hopeless-pseudo-e2"], "they are kept for their logs"


def test_a_job_that_the_trainer_rejects_is_not_restarted(cluster: Cluster) -> None:
    job = cluster.create("mistaken")
    (pod,) = job.run("mistaken-pseudo-e1")
    job.end(pod, "InvalidJob", message="spec.data.path corpus does not exist; name a folder")
    status = job.wait("the end", lambda status: status.state == "Failed")
    failed = job.condition("Failed")
    assert (failed["reason"], failed["message"]) == (
        "InvalidJob",
        "spec.data.path corpus does not exist; name a folder",
    )
    assert (status.restarts, status.execution, job.child_jobs()) == (0, 1, ["mistaken-pseudo-e1"])


def test_a_job_that_cannot_be_resolved_gets_no_children(cluster: Cluster) -> None:
    job = cluster.create("crowded", spec__phases__1__workers=9, spec__phases__1__parallelism={"pipeline": "AllRanks"})
    job.wait("the refusal", lambda status: status.state == "Failed")
    assert job.condition("Accepted")["status"] == "False"
    assert "9 ranks, more than spec.model.layers 8" in job.condition("Failed")["message"]
    assert job.child_jobs() == []
    job.tells("Failed")


def test_a_pod_template_that_the_api_server_rejects_fails_the_job(cluster: Cluster) -> None:
    job = cluster.create("overlaid", spec__pod={"template": {"spec": {"dnsPolicy": "Somehow"}}})
    job.wait("the refusal", lambda status: status.state == "Failed")
    failed = job.condition("Failed")
    assert failed["reason"] == "InvalidSpec"
    assert "dnsPolicy" in failed["message"]
    job.tells("Failed")


def test_a_pod_template_that_cannot_be_decoded_is_explained(cluster: Cluster) -> None:
    overlay = {"spec": {"containers": [{"name": "trainer", "resources": {"limits": {"memory": "many"}}}]}}
    job = cluster.create("unreadable", spec__pod={"template": overlay})
    job.wait("the explanation", lambda status: any("quantities must match" in c.message for c in status.conditions))


def test_a_later_phase_that_cannot_run_is_rejected_before_the_first_pod(cluster: Cluster) -> None:
    amounts = {"limits": {"memory": "16Gi"}, "requests": {"memory": "32Gi"}}
    job = cluster.create("backwards", spec__phases__1__resources=amounts)
    job.wait("the refusal", lambda status: status.state == "Failed")
    failed = job.condition("Failed")
    assert failed["reason"] == "InvalidSpec"
    assert "must be less than or equal to memory limit of 16Gi" in failed["message"]
    assert "(phase real)" in failed["message"]
    assert (job.condition("Accepted")["status"], job.child_jobs()) == ("False", [])
    assert not cluster.list("api/v1 services")


def test_a_job_waits_for_quota(cluster: Cluster) -> None:
    cluster.set_quota({"count/jobs.batch": "0"})
    job = cluster.create("poor")
    job.wait("the refusal", lambda status: any("exceeded quota" in c.message for c in status.conditions))
    assert job.condition("Progressing")["status"] == "False"
    cluster.set_quota({"count/jobs.batch": "9"})
    job.pods("poor-pseudo-e1")


def test_pods_that_cannot_start_are_explained(cluster: Cluster) -> None:
    job = cluster.create("stuck")
    (pod,) = job.pods("stuck-pseudo-e1")
    condition = {
        "type": "PodScheduled",
        "status": "False",
        "reason": "Unschedulable",
        "message": 'persistentvolumeclaim "checkpoints" not found',
    }
    cluster.patch_pod_status(pod["metadata"]["name"], {"conditions": [condition]})
    job.wait("the explanation", lambda s: any(c.reason == "Unschedulable" for c in s.conditions))
    progressing = job.condition("Progressing")
    assert progressing["status"] == "False"
    assert "checkpoints" in progressing["message"]
    assert "Claim checkpoints does not exist. What to do: create it" in progressing["message"]
    job.run("stuck-pseudo-e1")
    cluster.patch_pod_status(pod["metadata"]["name"], {"conditions": [condition | {"status": "True"}]})
    job.wait("the start", lambda s: any(c.type == "Progressing" and c.status == "True" for c in s.conditions))


def test_suspending_deletes_the_pods_and_resuming_continues(cluster: Cluster) -> None:
    job = cluster.create("paused")
    job.run("paused-pseudo-e1")
    job.wait("training", lambda status: status.current_phase == "pseudo")
    job.suspend(True)
    job.wait("the suspension", lambda status: status.state == "Suspended")
    wait_for("the end of the pods", lambda: not job.children("api/v1 pods"), lambda: job.status)
    assert job.child_jobs() == []
    assert job.condition("Suspended")["status"] == "True"
    job.suspend(False)
    complete_stage(job, "pseudo", execution=2)
    status = job.wait("the next stage", lambda status: status.phases[0].state == "Complete")
    assert (status.execution, status.restarts) == (2, 0)
    job.event("Resumed")
    assert [r for r in job.reasons() if r in ("Suspended", "Resumed")] == ["Suspended", "Resumed"]


def test_preemptions_leave_a_bounded_number_of_children(cluster: Cluster) -> None:
    """The garbage collector is real. The five newest failed executions keep their Jobs, for the logs of their pods."""
    job = cluster.create("preempted", **NO_BACKOFF)
    for execution in range(1, 9):
        (pod,) = job.run(f"preempted-pseudo-e{execution}")
        # Each has saved, so the next one does not wait longer than the one before.
        job.end(pod, "Yielded", step=execution, checkpoint=f"pseudo-{execution}")
    (last,) = job.run("preempted-pseudo-e9")

    def left() -> Counter[str]:
        return Counter(path for path in CHILD_PATHS for _ in job.children(path))

    wanted = {"api/v1 pods": 6, "api/v1 services": 1, "apis/batch/v1 jobs": 6}
    wanted |= {"apis/networking.k8s.io/v1 networkpolicies": 1}
    wait_for("the end of the others", lambda: left() == wanted, left)
    assert last["spec"]["subdomain"] == job.children("api/v1 services")[0]["metadata"]["name"]


def test_a_job_fails_at_its_deadline(cluster: Cluster) -> None:
    job = cluster.create("late", spec__deadlines={"activeSeconds": 3})
    job.run("late-pseudo-e1")
    job.wait("the end", lambda status: status.state == "Failed")
    assert job.condition("Failed")["reason"] == "DeadlineExceeded"
    wait_for("the end of the child", lambda: not job.child_jobs(), job.child_jobs)


def test_a_deleted_child_is_replaced_by_a_new_execution(cluster: Cluster) -> None:
    job = cluster.create("robbed", **NO_BACKOFF)
    job.run("robbed-pseudo-e1")
    job.wait("training", lambda status: status.current_phase == "pseudo")
    cluster.delete_child_job("robbed-pseudo-e1")
    job.pods("robbed-pseudo-e2")
    status = job.wait("the second execution", lambda status: status.execution == 2 and status.restart_after is None)
    assert status.restarts == 0

"""Pods with reports but without steps, and the operator's reaction."""

from typing import Any

import pytest
from pseudoreal_api.wire.messages import InPlace
from pseudoreal_api.wire.reports import PodReport, ReportAnswer, Takeover

from tests.integration.operator.support.endpoint import Reporter, progress, sign
from tests.support.cluster import Cluster, Job
from tests.support.patience import wait_for

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("shared_operator")]

NODE = "node-7"
TWO_WORKERS: dict[str, Any] = {
    "spec__phases__0__workers": 2,
    "spec__restart": {"backoffSeconds": 0, "maxRestarts": 1},
}


@pytest.fixture
def stuck(cluster: Cluster, request: pytest.FixtureRequest) -> Job:
    """A hanging job of two workers: rank 0 waits for rank 1, and rank 1 computes, on NODE."""
    job = cluster.create("stuck", spec__hang={"stepSeconds": 2, "action": request.param}, **TWO_WORKERS)
    pods = job.run("stuck-pseudo-e1", 2)
    job.bind(pods[1], NODE)
    says = [PodReport(ranks=[sign(0, 3, "waiting")], progress=progress(3)), PodReport(ranks=[sign(1, 3)])]
    for pod, report in zip(pods, says, strict=True):
        Reporter.of(cluster, pod).tell(report)
    return job


def blame(pod: dict[str, Any]) -> str:
    """Return the start of the sentence naming the suspected rank."""
    where = f"pod {pod['metadata']['name']}, node {NODE}"
    return f"No step for 2 s (spec.hang.stepSeconds) at step 3: rank 1 on {where}, is computing"


@pytest.mark.parametrize("stuck", ["Report"], indirect=True)
def test_a_hang_is_reported(stuck: Job) -> None:
    stuck.wait("the hang", lambda status: any(c.reason == "StepStalled" for c in status.conditions))
    progressing = stuck.condition("Progressing")
    assert progressing["status"] == "False"
    culprit = stuck.pods("stuck-pseudo-e1", 2)[1]
    assert progressing["message"].startswith(blame(culprit))
    event = stuck.event("HangDetected")
    assert (event["reason"], event["type"], event["message"]) == ("HangDetected", "Warning", progressing["message"])
    assert (stuck.status.restarts, stuck.child_jobs()) == (0, ["stuck-pseudo-e1"])


@pytest.mark.parametrize("stuck", ["Restart"], indirect=True)
def test_a_hang_restarts_the_job_and_counts(stuck: Job) -> None:
    culprit = stuck.pods("stuck-pseudo-e1", 2)[1]
    status = stuck.wait("the decision", lambda status: status.execution == 2)
    # The other pod has no node, and needs nobody to end it.
    stuck.end(culprit, exit_code=137)
    stuck.pods("stuck-pseudo-e2", 2)
    assert status.restarts == 1
    (fault,) = status.faults
    where = (culprit["metadata"]["name"], NODE)
    assert (fault.execution, fault.reason, fault.pod, fault.node) == (1, "StepStalled", *where)
    hang = stuck.event("HangDetected")
    assert hang["message"].startswith(blame(culprit))
    assert stuck.reasons().count("HangDetected") == 1


@pytest.mark.parametrize("stuck", ["Fail"], indirect=True)
def test_a_hang_fails_a_job_without_restarts_left(stuck: Job) -> None:
    culprit = stuck.pods("stuck-pseudo-e1", 2)[1]
    status = stuck.wait("the end", lambda status: status.state == "Failed")
    failed = stuck.condition("Failed")
    assert (failed["status"], failed["reason"]) == ("True", "StepStalled")
    assert failed["message"].startswith(blame(culprit))
    assert status.restarts == 0
    wait_for("the end of its Job", lambda: not stuck.child_jobs())


def test_a_spare_pod_replaces_the_pod_of_a_hung_rank(cluster: Cluster) -> None:
    job = cluster.create("held-up", spec__hang={"stepSeconds": 2}, spec__phases__0__spares=1, **TWO_WORKERS)
    pods = job.run("held-up-pseudo-e1", 3)
    job.bind(pods[1], NODE)
    reporters = [Reporter.of(cluster, pod) for pod in pods]
    reporters[2].tell(PodReport())
    job.wait("the spare pod", lambda _: "1 of 1 spare pods waits" in job.condition("Progressing")["message"])
    reporters[1].tell(PodReport(ranks=[sign(1, 3)]))
    reporters[0].tell(PodReport(ranks=[sign(0, 3, "waiting")], progress=progress(3)))
    status = job.wait("the decision", lambda status: status.spares is not None or status.execution == 2)
    assert status.spares is not None
    assert [(place.worker, place.pod) for place in status.spares.places] == [(1, 2)]
    (fault,) = status.faults
    assert (fault.reason, fault.node, fault.restart_in_place) == ("StepStalled", NODE, status.spares.restart)
    said = job.event("SpareTookOver")["message"]
    assert said.startswith(blame(pods[1]))
    assert job.event("HangDetected")["message"] == said
    assert _takeovers(reporters[0], PodReport(ranks=[sign(0, 3, "waiting")])) == [Takeover(worker=1, pod=2)]
    # Its node has no kubelet, so the pod stays.
    wait_for("the end of the hung pod", lambda: _is_ending(job, pods[1]))
    assert not any(_is_ending(job, pod) for pod in (pods[0], pods[2]))
    for reporter, rank in ((reporters[2], 1), (reporters[0], 0)):
        met = InPlace(restarts=status.spares.restart, peer_lost=True, message="took a place")
        reporter.tell(PodReport(ranks=[sign(rank, 4)], in_place=met))
    for pod in (pods[0], pods[2]):
        job.end(pod, "Succeeded", checkpoint="pseudo-10")
    status = job.wait("the next stage", lambda status: status.phases[0].state == "Complete" or status.execution == 2)
    assert (status.execution, status.restarts) == (1, 1)


def _takeovers(reporter: Reporter, report: PodReport) -> list[Takeover]:
    answer = ReportAnswer.model_validate_json(reporter.tell(report).text)
    return answer.membership.takeovers if answer.membership else []


def _is_ending(job: Job, pod: dict[str, Any]) -> bool:
    found = [one for one in job.children("api/v1 pods") if one["metadata"]["name"] == pod["metadata"]["name"]]
    return not found or "deletionTimestamp" in found[0]["metadata"]

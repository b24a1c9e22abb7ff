"""Pods with reports but without steps, and the operator's reaction."""

from typing import Any

import pytest
from pseudoreal_api.wire.reports import PodReport

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
def test_a_hang_is_told(stuck: Job) -> None:
    stuck.wait("the hang", lambda status: any(c.reason == "StepStalled" for c in status.conditions))
    progressing = stuck.condition("Progressing")
    assert progressing["status"] == "False"
    culprit = stuck.pods("stuck-pseudo-e1", 2)[1]
    assert progressing["message"].startswith(blame(culprit))
    event = stuck.event("HangDetected")
    assert (event["reason"], event["type"], event["message"]) == ("HangDetected", "Warning", progressing["message"])
    assert (stuck.status.restarts, stuck.child_jobs()) == (0, ["stuck-pseudo-e1"])


@pytest.mark.parametrize("stuck", ["Restart"], indirect=True)
def test_a_hang_is_a_fault(stuck: Job) -> None:
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
def test_a_hang_ends_the_job(stuck: Job) -> None:
    culprit = stuck.pods("stuck-pseudo-e1", 2)[1]
    status = stuck.wait("the end", lambda status: status.state == "Failed")
    failed = stuck.condition("Failed")
    assert (failed["status"], failed["reason"]) == ("True", "StepStalled")
    assert failed["message"].startswith(blame(culprit))
    assert status.restarts == 0
    wait_for("the end of its Job", lambda: not stuck.child_jobs())

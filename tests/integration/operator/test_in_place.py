"""Pods restart their ranks in place and report it: the restart is counted and announced, and spare pods replace lost
ones."""

import json
from functools import partial
from typing import Any

import pytest
from kubernetes import client
from pseudoreal_api.names import CONFIG_FILE, file_annotation
from pseudoreal_api.wire.messages import InPlace
from pseudoreal_api.wire.reports import Membership, PodReport, ReportAnswer, Takeover

from tests.integration.operator.support.endpoint import Reporter, sign
from tests.support.cluster import Cluster
from tests.support.patience import wait_for

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("shared_operator")]

Json = dict[str, Any]

DIED = InPlace(restarts=1, peer_lost=False, message="local rank 0 ended without a message")
FOLLOWED = InPlace(restarts=1, peer_lost=True, message="Connection closed by peer")


def test_a_restart_in_place_is_counted_and_keeps_the_pods(cluster: Cluster) -> None:
    job = cluster.create("in-place", spec__phases__0__workers=2, spec__restart={"backoffSeconds": 0})
    pods = job.run("in-place-pseudo-e1", 2)
    assert [_allowed(pod) for pod in pods] == [3, 3]
    first, second = (Reporter.of(cluster, pod) for pod in pods)
    for rank, pod in enumerate((first, second)):
        pod.tell(PodReport(ranks=[sign(rank, 5)]))
    second.tell(PodReport(in_place=DIED))
    answer = ReportAnswer.model_validate_json(first.tell(PodReport(ranks=[sign(0, 5)])).text)
    assert answer.restarts_in_place == 1, "it has noticed nothing"
    assert job.status.restarts == 0
    for rank, (pod, said) in enumerate(((first, FOLLOWED), (second, DIED))):
        pod.tell(PodReport(ranks=[sign(rank, 4, "starting")], in_place=said))
    status = job.wait("the count", lambda status: status.restarts == 1)
    victim = pods[1]["metadata"]["name"]
    assert [(fault.pod, fault.reason, fault.restart_in_place) for fault in status.faults] == [(victim, "PodFailed", 1)]
    message = job.event("RestartedInPlace")["message"]
    assert message.startswith(f"Pod {victim} (worker 1): {DIED.message}. All ranks were restarted in the same pods")
    assert (status.execution, status.state) == (1, "Training")
    job.end(pods[1], "Failed", message="local rank 0 ended without a message", in_place=DIED)
    status = job.wait("the next execution", lambda status: status.execution == 2)
    assert status.restarts == 2, "the first is not counted again"
    told = [_allowed(pod) for pod in job.pods("in-place-pseudo-e2", 2)]
    assert told == [1, 1], "three restarts of the job, of which two are used"


def _allowed(pod: Json) -> int:
    """Return the number of restarts in place in the pod's configuration."""
    return int(json.loads(pod["metadata"]["annotations"][file_annotation(CONFIG_FILE)])["inPlace"])


def test_a_spare_pod_replaces_a_lost_worker(cluster: Cluster) -> None:
    job = cluster.create("spare", spec__phases__0__workers=2, spec__phases__0__spares=1)
    pods = job.run("spare-pseudo-e1", 3)
    reporters = [Reporter.of(cluster, pod) for pod in pods]
    for rank in (0, 1):
        reporters[rank].tell(PodReport(ranks=[sign(rank, 5)]))
    assert _answer(reporters[2], PodReport()).membership is None
    job.wait("the spare pod", lambda _: "1 of 1 spare pods waits" in job.condition("Progressing")["message"])
    assert job.status.replicas.desired == 2
    job.end(pods[0], "Yielded", message="asked to stop")
    waits = PodReport(in_place=InPlace(restarts=1, peer_lost=True, message="asked to stop"))
    reporters[1].tell(waits)
    status = job.wait("the place", lambda status: status.spares is not None)
    assert status.spares is not None
    assert [(place.worker, place.pod) for place in status.spares.places] == [(0, 2)]
    taken = Membership(restart=2, own_restarts=3, takeovers=[Takeover(worker=0, pod=2)])
    for reporter, report in ((reporters[1], waits), (reporters[2], PodReport())):
        wait_for("the word", partial(_is_told, reporter, report, taken))
    for reporter, rank in ((reporters[2], 0), (reporters[1], 1)):
        said = InPlace(restarts=2, peer_lost=True, message="took a place")
        reporter.tell(PodReport(ranks=[sign(rank, 6)], in_place=said))
    job.wait("the training", lambda _: "is training" in job.condition("Progressing")["message"])
    for pod in pods[1:]:
        job.end(pod, "Succeeded", checkpoint="pseudo-10")
    status = job.wait("the next stage", lambda status: status.phases[0].state == "Complete")
    assert (status.execution, status.restarts, status.faults) == (1, 0, [])
    assert "replaces worker 0" in job.event("SpareTookOver")["message"]


@pytest.mark.long
def test_an_unkillable_spare_pod_does_not_delay_the_end_of_a_phase(cluster: Cluster) -> None:
    """The pod's node has no kubelet, like a node switched off."""
    job = cluster.create("stuck", spec__phases__0__workers=2, spec__phases__0__spares=1)
    pods = job.pods("stuck-pseudo-e1", 3)
    job.bind(pods[2], "node-off")
    for pod in pods:
        job.start(pod)
    options: Any = {"grace_period_seconds": 1}
    client.CoreV1Api(cluster.api).delete_namespaced_pod(pods[2]["metadata"]["name"], cluster.namespace, **options)
    for pod in pods[:2]:
        job.end(pod, "Succeeded", checkpoint="pseudo-10")
    job.wait("the end of the phase", lambda status: status.phases[0].state == "Complete")
    (child,) = job.children("apis/batch/v1 jobs")
    said = [condition["type"] for condition in child["status"].get("conditions", [])]
    assert "Complete" not in said, "the Job waits for the spare pod"
    wait_for("the delink", lambda: "stuck-real-delink-e1" in job.child_jobs(), lambda: job.status)


def _answer(reporter: Reporter, report: PodReport) -> ReportAnswer:
    return ReportAnswer.model_validate_json(reporter.tell(report).text)


def _is_told(reporter: Reporter, report: PodReport, taken: Membership) -> bool:
    return _answer(reporter, report).membership == taken

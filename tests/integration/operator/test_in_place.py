"""Pods that restart their ranks in place and report it: it is counted and told, and nothing is made anew."""

import json
from typing import Any

import pytest
from pseudoreal_api.names import CONFIG_FILE, file_annotation
from pseudoreal_api.wire.messages import InPlace
from pseudoreal_api.wire.reports import PodReport, ReportAnswer

from tests.integration.operator.endpoint import Reporter, sign
from tests.support.cluster import Cluster

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("shared_operator")]

Json = dict[str, Any]

DIED = InPlace(restarts=1, peer_lost=False, message="local rank 0 ended without a word")
FOLLOWED = InPlace(restarts=1, peer_lost=True, message="Connection closed by peer")


def test_ranks_that_are_restarted_in_place_are_counted_and_their_pods_stay(cluster: Cluster) -> None:
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
    job.end(pods[1], "Failed", message="local rank 0 ended without a word", in_place=DIED)
    status = job.wait("the next execution", lambda status: status.execution == 2)
    assert status.restarts == 2, "the first is not counted again"
    told = [_allowed(pod) for pod in job.pods("in-place-pseudo-e2", 2)]
    assert told == [1, 1], "three restarts of the job, of which two are used"


def _allowed(pod: Json) -> int:
    """The number of restarts in place that the pod is told."""
    return int(json.loads(pod["metadata"]["annotations"][file_annotation(CONFIG_FILE)])["inPlace"])

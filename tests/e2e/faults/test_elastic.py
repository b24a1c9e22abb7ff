"""An elastic phase goes on with one worker while a node is drained or lost, and with both once it is back."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from pseudoreal_dev.cluster import network
from pseudoreal_dev.cluster.kubectl import Kubernetes

from tests.e2e.faults.support.apart import apart
from tests.e2e.faults.support.undisturbed import REAL
from tests.e2e.support.job import IN_NAMESPACE, Job

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.usefixtures("other_node")]

PATIENCE = 5


def elastic(name: str) -> dict[str, Any]:
    """Return changes for a job with a second phase on two nodes, or on one, until it is asked to end.

    Required anti-affinity keeps two of its pods off one node.
    """
    template = apart(name)
    (wish,) = template["spec"]["affinity"]["podAntiAffinity"].pop("preferredDuringSchedulingIgnoredDuringExecution")
    alone = {"requiredDuringSchedulingIgnoredDuringExecution": [wish["podAffinityTerm"]]}
    template["spec"]["affinity"]["podAntiAffinity"] = alone
    return {
        "spec__pod": {"terminationGracePeriodSeconds": 10, "template": template},
        "spec__phases__1__elastic": {"minWorkers": 1, "patienceSeconds": PATIENCE},
        "spec__phases__1__until__step": 1_000_000,
    }


def test_a_drained_node_is_done_without_until_it_is_back(start: Callable[..., Job], kubernetes: Kubernetes) -> None:
    job = start("smaller", **elastic("smaller"))
    job.wait_for_steps("real", REAL + 20)
    try:
        selector = f"--pod-selector=pseudoreal.dev/job-name={job.name}"
        kubernetes.run("drain", network.SECOND.node, "--delete-emptydir-data", "--timeout=10m", selector)
        one_worker_trains(job)
    finally:
        kubernetes.run("uncordon", network.SECOND.node)
    job.wait("both workers", lambda status: status.elastic is None and status.replicas.ready == 2)
    steps = job.steps()
    job.wait_for_steps("real", steps + 20)
    finish(job)
    status = job.wait_for_end()
    assert (status.state, status.restarts) == ("Complete", 0), status
    assert job.reasons().count("Resized") >= 2
    trained = job.steps_in_order()
    assert trained == [*range(1, len(trained) + 1)], "every step is made once"


def test_a_lost_node_is_done_without_while_its_pod_cannot_be_ended(
    start: Callable[..., Job],
) -> None:
    job = start("bereft", **elastic("bereft"))
    pods = job.wait_for_steps("real", REAL + 20)
    (lost,) = [pod for pod in pods if pod["spec"]["nodeName"] == network.SECOND.node]
    network.cut_second()
    try:
        one_worker_trains(job)
        names = [pod["metadata"]["name"] for pod in job.alive()]
        assert lost["metadata"]["name"] in names, "nobody has ended it"
        assert job.status().abandoned_execution == 1
    finally:
        network.join_second()
    finish(job)
    status = job.wait_for_end()
    assert (status.state, status.restarts) == ("Complete", 0), status
    assert sorted(set(job.steps_in_order())) == [*range(1, job.steps() + 1)], "no step is left out"


def one_worker_trains(job: Job) -> None:
    def alone(status: Any) -> bool:
        return status.elastic is not None and status.elastic.workers == 1 and status.replicas.ready == 1

    job.wait("one worker", alone)
    steps = job.steps()
    job.wait_for("steps of one worker", lambda: job.steps() >= steps + 10)


def finish(job: Job) -> None:
    wish = {"spec": {"requests": [{"id": "enough", "type": "FinishPhase", "phase": "real"}]}}
    job.kubernetes.run("patch", "prj", job.name, IN_NAMESPACE, "--type=merge", f"--patch={json.dumps(wish)}")

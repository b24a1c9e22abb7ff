"""Blame for a fault, ten times each on jobs of two and four pods: the operator names the pod at the origin of the
fault, not a pod with a broken connection."""

import random
import signal
from collections.abc import Callable
from typing import Any

import pytest
from pseudoreal_dev.cluster import network
from pseudoreal_dev.cluster.kubectl import Kubernetes

from tests.e2e.faults.support.apart import apart
from tests.e2e.support import machine
from tests.e2e.support.job import Job, wait_for
from tests.e2e.support.machine import TORCHRUN

pytestmark = [pytest.mark.e2e, pytest.mark.long]

Json = dict[str, Any]
TRIALS = 10
STEPS = 15
"""Steps between two faults, with checkpoints in between."""


def kill_torchrun(pod: Json) -> None:
    machine.tell(pod, signal.SIGKILL, TORCHRUN)


def raise_in_a_rank(pod: Json) -> None:
    """Limit the file size of a rank: its outcome still fits, its next checkpoint does not."""
    machine.bound_files(pod, 16 * 1024)


KINDS: list[tuple[Callable[[Json], None], str, str]] = [
    (kill_torchrun, "PodFailed", "torchrun was killed (signal 9)"),
    (machine.starve, "OutOfMemory", "ran out of memory"),
    (raise_in_a_rank, "PodFailed", "File too large"),
]


def trained_by(pods: int) -> Json:
    """Return changes for a job trained until its deletion, despite all injected faults."""
    phase = {"name": "real", "until": {"step": 1_000_000}, "batch": {"sequences": 8}, "workers": pods}
    return {
        "spec__phases": [phase],
        "spec__checkpoint__everySteps": 5,
        "spec__restart": {"backoffSeconds": 1, "maxRestarts": 2 * TRIALS, "avoidNodesAfter": 100},
    }


@pytest.mark.parametrize("pods", [2, 4])
@pytest.mark.parametrize(("hurt", "reason", "words"), KINDS)
def test_the_pod_where_it_began_is_named(
    hurt: Callable[[Json], None], reason: str, words: str, pods: int, start: Callable[..., Job]
) -> None:
    name = hurt.__name__.replace("_", "-")
    chance, victims, steps = random.Random(f"{name} {pods}"), [], STEPS
    job = start(f"{name}-{pods}", **trained_by(pods))
    for number in range(TRIALS):
        victim = chance.choice(_all_running(job, pods, number + 1, steps))
        # More than any execution so far: the next one trains, and has caught up.
        steps = job.steps() + STEPS
        victims.append(victim["metadata"]["name"])
        hurt(victim)
        job.wait_for_execution(number + 2)
    told = [event["message"] for event in job.events() if event["reason"] == "ExecutionFailed"]
    faults = job.status().faults
    assert [(fault.reason, fault.pod) for fault in faults] == [(reason, victim) for victim in victims], told
    for victim, message in zip(victims, told, strict=True):
        assert message.startswith(f"Pod {victim} "), message
        assert words in message


def _all_running(job: Job, pods: int, execution: int, steps: int) -> list[Json]:
    def reached() -> list[Json] | None:
        running = job.running()
        present = len(running) == pods and job.status().execution == execution
        return running if present and job.steps() >= steps else None

    return job.wait_for(f"{steps} steps of execution {execution} of {job.name}", reached)


@pytest.mark.parametrize("pods", [2, 4])
@pytest.mark.usefixtures("other_node")
def test_pods_on_a_node_that_vanishes_are_named(pods: int, start: Callable[..., Job], kubernetes: Kubernetes) -> None:
    """The fault is known from the lost pods; the other pods see their connections break long before."""
    for number in range(TRIALS):
        name = f"vanished-{pods}-{number}"
        job = start(name, spec__pod={"terminationGracePeriodSeconds": 3, "template": apart(name)}, **trained_by(pods))
        running = _all_running(job, pods, 1, STEPS)
        lost = [pod["metadata"]["name"] for pod in running if pod["spec"]["nodeName"] == network.SECOND.node]
        assert lost, "some are on the second node"
        network.cut_second()
        try:
            job.wait("a verdict", lambda status: status.execution == 2)
            told = job.told("ExecutionFailed")
            assert any(told.startswith(f"Pod {pod} ") for pod in lost), (told, lost)
            assert job.status().restarts == 0, "what is wrong with a node does not count"
            for pod in lost:
                kubernetes.run("delete", "pod", pod, "--namespace=default", "--force", "--grace-period=0")
            kubernetes.run("delete", "prj", name, "--namespace=default", "--wait=false")
        finally:
            network.join_second()
        wait_for("the node", lambda: _is_usable(kubernetes))


def _is_usable(kubernetes: Kubernetes) -> bool | None:
    """Return True if the node is ready and without the taint for evicting pods at once; else None."""
    node = kubernetes.find("node", network.SECOND.node)
    if node is None or node["spec"].get("taints"):
        return None
    return any(c["type"] == "Ready" and c["status"] == "True" for c in node["status"]["conditions"]) or None

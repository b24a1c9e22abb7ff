"""Outages of parts of the cluster: its API server, its container runtime, a whole node."""

import time
from collections.abc import Callable

import pytest
from pseudoreal_dev.cluster import binaries, cluster, network
from pseudoreal_dev.cluster.kubectl import Kubernetes

from tests.e2e.faults.support.apart import apart
from tests.e2e.faults.support.undisturbed import REAL, Undisturbed
from tests.e2e.support.job import Job, wait_for

pytestmark = pytest.mark.e2e

OUTAGE_SECONDS = 60.0


@pytest.mark.long
def test_an_api_server_that_is_down_for_a_minute_disturbs_nothing(
    start: Callable[..., Job], undisturbed: Undisturbed
) -> None:
    """The phase ends during the outage; the operator sees its end afterwards."""
    job = start("unheard")
    job.wait_for_steps("pseudo", 20)
    folder, control = job.folder, cluster.control()
    end = time.monotonic() + OUTAGE_SECONDS
    control.kill_api_server()
    try:
        at_end = folder / "checkpoints" / f"pseudo-{REAL:08d}" / "manifest.json"
        wait_for("the end of the phase", at_end.exists)
        wait_for("a minute", lambda: time.monotonic() > end)
    finally:
        control.start_api_server(binaries.build())
    undisturbed.check(job)
    status = job.status()
    assert (status.restarts, status.execution) == (0, 1)


@pytest.mark.long
def test_a_restarted_container_runtime_disturbs_nothing(start: Callable[..., Job], undisturbed: Undisturbed) -> None:
    job = start("shimmed")
    job.wait_for_steps("real", REAL + 20)
    trained = job.steps()
    cluster.containerd().pause()
    try:
        wait_for("training without the runtime", lambda: job.steps() > trained + 20)
    finally:
        cluster.containerd().resume()
    undisturbed.check(job)
    status = job.status()
    assert (status.restarts, status.execution) == (0, 1)


@pytest.mark.long
@pytest.mark.usefixtures("other_node")
def test_a_lost_node_is_named_and_training_goes_on_elsewhere(
    start: Callable[..., Job], undisturbed: Undisturbed, kubernetes: Kubernetes
) -> None:
    """The node is disconnected from the network. The pod on it keeps running, and must not interfere."""
    job = start("torn", spec__pod={"terminationGracePeriodSeconds": 3, "template": apart("torn")})
    pods = job.wait_for_steps("real", REAL + 20)
    (lost,) = [pod for pod in pods if pod["spec"]["nodeName"] == network.SECOND.node]
    network.cut_second()
    job.wait("a wait for the lost pod", lambda _: job.condition("Progressing").reason == "AwaitingCleanup")
    told, name = job.condition("Progressing").message, lost["metadata"]["name"]
    assert f"pod {name} of an earlier execution" in told
    assert network.SECOND.node in told
    command = f"kubectl delete pod {name} -n default --force"
    assert command in told
    kubernetes.run(*command.split()[1:], "--grace-period=0")
    job.wait_for_steps("real", REAL + 50)
    network.join_second()
    undisturbed.check(job, "ExecutionFailed", "RestartStarted")
    assert "was disrupted (DeletionByTaintManager" in job.told("ExecutionFailed")
    status = job.status()
    assert (status.restarts, status.execution) == (0, 2)

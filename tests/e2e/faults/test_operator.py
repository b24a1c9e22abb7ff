"""The operator is killed, upgraded, and uninstalled while training goes on."""

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from pseudoreal_dev.cluster.kubectl import Kubernetes
from pseudoreal_dev.demo import chart

from tests.e2e.faults.support.undisturbed import REAL, Undisturbed
from tests.e2e.support import machine
from tests.e2e.support.job import IN_NAMESPACE, PATIENCE_SECONDS, Job, wait_for
from tests.e2e.support.operator_pod import PROGRAM, install, ready_operator, starts
from tests.e2e.support.releases import PREVIOUS, Release, previous_release
from tests.support import patience

pytestmark = pytest.mark.e2e


@pytest.mark.long
def test_an_operator_killed_in_each_stage_disturbs_nothing(
    start: Callable[..., Job], undisturbed: Undisturbed, kubernetes: Kubernetes
) -> None:
    """The operator is killed in the pseudo phase, during the delink, and in the real phase."""
    job = start("orphan")
    before = ready_operator(kubernetes)
    job.wait_for_steps("pseudo", 20)
    _kill(kubernetes)
    # It takes a few seconds: on a busy machine the container may have ended between two looks of a second.
    patience.wait_for("the delink", lambda: job.alive("delink"), job.status, PATIENCE_SECONDS)
    _kill(kubernetes)
    job.wait_for_steps("real", REAL + 20)
    _kill(kubernetes)
    undisturbed.check(job)
    status = job.status()
    assert (status.restarts, status.execution) == (0, 1)
    assert len(job.pods()) == 1 + 1 + 2
    assert starts(ready_operator(kubernetes)) == starts(before) + 3


@pytest.fixture
def previous(tmp_path: Path) -> Release:
    release = previous_release(tmp_path)
    if release is None:
        pytest.skip(f"commit {PREVIOUS}, the release before this one, is not in this clone: git fetch --unshallow")
    return release


@pytest.mark.long
def test_an_upgrade_from_the_release_before_disturbs_nothing(
    start: Callable[..., Job], undisturbed: Undisturbed, kubernetes: Kubernetes, previous: Release
) -> None:
    kubernetes.run_helm("uninstall", chart.RELEASE, f"--namespace={chart.NAMESPACE}", "--wait", "--timeout=10m")
    previous.install(kubernetes)
    try:
        job = start("upgraded")
        trainer = job.wait_for_steps("pseudo", 20)[0]
    finally:
        install(kubernetes)
    ready_operator(kubernetes)
    undisturbed.check_loss(job)
    assert trainer["spec"]["containers"][0]["image"] == previous.trainer
    assert trainer["metadata"]["uid"] in {pod["metadata"]["uid"] for pod in job.pods()}
    assert {pod["spec"]["containers"][0]["image"] for pod in job.pods("train")} > {previous.trainer}
    status = job.status()
    assert (status.restarts, status.execution) == (0, 1)


@pytest.mark.long
def test_uninstalling_leaves_pods_that_train_and_jobs_that_can_be_deleted(
    start: Callable[..., Job], undisturbed: Undisturbed, kubernetes: Kubernetes
) -> None:
    job, idle = start("left-behind"), start("left-idle", spec__suspend=True)
    job.wait_for_steps("pseudo", 20)
    kubernetes.run_helm("uninstall", chart.RELEASE, f"--namespace={chart.NAMESPACE}", "--wait", "--timeout=10m")
    try:
        kubernetes.run("delete", "prj", idle.name, IN_NAMESPACE, "--timeout=60s")
        wait_for("the end of the phase", lambda: job.steps() == REAL and not job.alive(), job.pods)
    finally:
        install(kubernetes)
    undisturbed.check(job)


def _kill(kubernetes: Kubernetes) -> None:
    """Kill the operator, and wait until Kubernetes has restarted it."""
    pod = ready_operator(kubernetes)
    machine.tell(pod, signal.SIGKILL, PROGRAM)
    wait_for("the operator's end", lambda: starts(ready_operator(kubernetes)) > starts(pod))

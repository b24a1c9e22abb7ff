"""The operator is killed, upgraded, and uninstalled while training goes on."""

import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pseudoreal_api.base import GROUP, PLURAL
from pseudoreal_dev.cluster.kubectl import Kubernetes
from pseudoreal_dev.demo import chart
from pseudoreal_trainer.checkpoint.manifest import FORMAT_VERSION

from tests.e2e.faults.support.undisturbed import REAL, Undisturbed
from tests.e2e.support import machine
from tests.e2e.support.job import IN_NAMESPACE, PATIENCE_SECONDS, Job, wait_for
from tests.e2e.support.operator_pod import PROGRAM, install, ready_operator, starts
from tests.e2e.support.releases import PREVIOUS, Release, previous_release
from tests.support import patience

pytestmark = pytest.mark.e2e


@pytest.mark.long
def test_killing_the_operator_in_each_stage_does_not_disturb_training(
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
        pytest.skip(f"release {PREVIOUS}, the one before this, is not in this clone: git fetch --unshallow")
    return release


@dataclass(frozen=True)
class Upgraded:
    """A job whose first phase is trained by the previous release, and whose second phase by this one."""

    job: Job
    changes: dict[str, Any]
    """Changes of the good job."""

    def check(self, previous: Release, trainer: dict[str, Any]) -> None:
        """Assert that the job succeeds as if nothing had happened. `trainer`: the pod that the upgrade found."""
        status = self.job.wait_for_end()
        assert status.state == "Complete", status
        assert (status.restarts, status.execution) == (0, 1)
        assert {event["type"] for event in self.job.events()} == {"Normal"}
        assert trainer["spec"]["containers"][0]["image"] == previous.trainer
        assert trainer["metadata"]["uid"] in {pod["metadata"]["uid"] for pod in self.job.pods()}
        assert {pod["spec"]["containers"][0]["image"] for pod in self.job.pods("train")} > {previous.trainer}
        versions = {(manifest["phase"], manifest["formatVersion"]) for manifest in self.job.manifests()}
        assert versions == {("pseudo", 4), ("real", FORMAT_VERSION)}

    def continue_elsewhere(self, start: Callable[..., Job]) -> Job:
        """Start a job of this release alone that continues from the last checkpoint of the previous release."""
        name = self.job.name.replace("upgraded", "continued")
        copy = self.job.folder.with_name(f"{name}-11111111")
        for checkpoint in self.job.checkpoints("pseudo"):
            shutil.copytree(checkpoint, copy / "checkpoints" / checkpoint.name)
        return start(name, **self.changes, spec__checkpoint__continueFrom=copy.name)


@pytest.mark.long
def test_an_upgrade_from_the_release_before_does_not_disturb_training(
    start: Callable[..., Job], kubernetes: Kubernetes, previous: Release
) -> None:
    """A dense job and one with experts, whose layout in checkpoints has changed since. The values of the release are
    reused. Weights and moments are those of this release's trainer, undisturbed from the same checkpoint on."""
    kubernetes.run_helm("uninstall", chart.RELEASE, f"--namespace={chart.NAMESPACE}", "--wait", "--timeout=10m")
    # Helm leaves the definition, with the fields of this release.
    kubernetes.run("delete", "crd", f"{PLURAL}.{GROUP}", "--ignore-not-found", "--timeout=5m")
    dense: dict[str, Any] = {"spec__phases__1__until__step": REAL + 30}
    experts = dense | {"spec__model__experts": {"count": 4, "prototypes": 2}}
    try:
        previous.install(kubernetes)
        upgraded = [Upgraded(start(f"upgraded-{n}", **changes), changes) for n, changes in enumerate((dense, experts))]
        trainers = [one.job.wait_for_steps("pseudo", 20)[0] for one in upgraded]
    except BaseException:
        install(kubernetes)
        raise
    install(kubernetes, "--reuse-values")
    ready_operator(kubernetes)
    for one, trainer in zip(upgraded, trainers, strict=True):
        one.check(previous, trainer)
    continued = [one.continue_elsewhere(start) for one in upgraded]
    for one, other in zip(upgraded, continued, strict=True):
        assert other.wait_for_end().state == "Complete"
        assert one.job.final_files() == other.final_files(), "the weights and moments are equal"


@pytest.mark.long
def test_uninstalling_leaves_training_pods_running_and_jobs_deletable(
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

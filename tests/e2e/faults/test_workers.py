"""Pods that train are killed, stopped, suspended in the middle of a save, driven off their node."""

import json
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from pseudoreal_dev.cluster.kubectl import Kubernetes

from tests.e2e import machine
from tests.e2e.faults.undisturbed import REAL, Undisturbed
from tests.e2e.job import Job, wait_for
from tests.e2e.machine import RANK

pytestmark = pytest.mark.e2e

# What is stopped in the middle of a save is found by the clock of the save.
HANG = {"stepSeconds": 10, "checkpointSeconds": 10}
AGAIN = ("AttemptFailed", "RestartStarted")


def test_a_rank_that_is_killed_is_named_and_all_start_again(
    start: Callable[..., Job], undisturbed: Undisturbed
) -> None:
    job = start("killed")
    victim = job.wait_for_steps("real", REAL + 20)[1]
    machine.tell(victim, signal.SIGKILL, RANK)
    undisturbed.check(job, *AGAIN)
    status, name = job.status(), victim["metadata"]["name"]
    assert [(fault.reason, fault.pod) for fault in status.faults] == [("PodFailed", name)]
    assert (status.restarts, status.attempt, status.execution_attempt) == (1, 2, 2)
    told = job.told("AttemptFailed")
    assert name in told
    assert "killed" in told


@pytest.mark.long
def test_a_rank_that_is_stopped_is_named_and_all_start_again(
    start: Callable[..., Job], undisturbed: Undisturbed
) -> None:
    job = start("stopped", spec__hang=HANG, spec__pod={"terminationGracePeriodSeconds": 3})
    victim = job.wait_for_steps("real", REAL + 20)[1]
    machine.tell(victim, signal.SIGSTOP, RANK)
    undisturbed.check(job, "HangDetected", *AGAIN)
    (fault,) = job.status().faults
    where = (victim["metadata"]["name"], victim["spec"]["nodeName"])
    assert fault.reason in ("StepStalled", "CheckpointStalled")
    assert (fault.pod, fault.node) == where
    assert "rank 1 on pod {}, node {}, is stopped".format(*where) in job.told("AttemptFailed")


@pytest.mark.long
def test_suspending_in_the_middle_of_a_save_loses_no_step(start: Callable[..., Job], undisturbed: Undisturbed) -> None:
    job = start("asleep", spec__checkpoint__everySteps=1)
    (first, _) = job.wait_for_steps("real", REAL + 20)
    saving = _stop_in_a_save(job, first)
    job.suspend(True)
    wait_for("the rank's SIGTERM", lambda: machine.has_pending(first, signal.SIGTERM, RANK))
    assert not (saving / "manifest.json").exists()
    machine.tell(first, signal.SIGCONT, RANK)
    wait_for("the pods' end", lambda: not job.alive(), job.pods)
    status = job.wait("Suspended", lambda status: status.phase == "Suspended")
    assert (status.restarts, status.attempt) == (0, 1)
    newest = job.checkpoints("real")[-1]
    assert int(newest.name.removeprefix("real-")) == job.steps()
    assert status.checkpoint is not None
    assert status.checkpoint.latest == newest.name
    assert (saving / "manifest.json").exists(), "the save that was interrupted is committed as well"
    job.suspend(False)
    undisturbed.check(job, "Suspended", "Resumed", "RestartStarted")
    assert (job.status().restarts, job.status().execution_attempt) == (0, 2)


@pytest.mark.long
def test_a_drained_node_costs_no_restart_and_no_step(
    start: Callable[..., Job], undisturbed: Undisturbed, kubernetes: Kubernetes
) -> None:
    job = start("driven-off")
    pods = job.wait_for_steps("real", REAL + 20)
    node = pods[0]["spec"]["nodeName"]
    try:
        options = ("--delete-emptydir-data", "--timeout=10m", f"--pod-selector=pseudoreal.dev/job-name={job.name}")
        kubernetes.run("drain", node, *options)
        trained = job.steps()
        job.wait("pods that wait for a node", lambda _: job.condition("Progressing").reason == "Unschedulable")
        assert int(job.checkpoints("real")[-1].name.removeprefix("real-")) == trained
    finally:
        kubernetes.run("uncordon", node)
    undisturbed.check(job, *AGAIN)
    status = job.status()
    assert (status.restarts, status.attempt, status.execution_attempt) == (0, 1, 2)
    told = job.told("AttemptFailed")
    # Kubernetes may have removed them before the operator looks.
    assert "was disrupted (EvictionByEvictionAPI" in told or "were deleted" in told


@pytest.mark.long
def test_a_job_that_was_given_up_is_continued_by_another(start: Callable[..., Job], undisturbed: Undisturbed) -> None:
    failed = start("given-up", spec__restart={"maxRestarts": 0})
    machine.tell(failed.wait_for_steps("real", REAL + 20)[0], signal.SIGKILL, RANK)
    assert failed.wait_for_end().phase == "Failed"
    why = failed.condition("Failed")
    assert why.reason == "RestartsExhausted"
    assert f"continueFrom: {failed.folder.name})" in why.message
    job = start("goes-on", spec__checkpoint__continueFrom=failed.folder.name)
    undisturbed.check(job)
    assert len(job.checkpoints("pseudo")) == 1, "nothing was trained again"
    first = json.loads((job.folder / "metrics.jsonl").read_text().splitlines()[0])
    assert first["step"] > REAL + 15


def _stop_in_a_save(job: Job, pod: dict[str, object]) -> Path:
    """Stops the pod's rank while a checkpoint is being written: its folder is there, and its manifest is not."""
    folder = job.folder / "checkpoints"

    def stopped() -> Path | None:
        open_ones = [path for path in folder.glob("real-*") if not (path / "manifest.json").exists()]
        if not open_ones:
            return None
        machine.tell(pod, signal.SIGSTOP, RANK)
        if not (open_ones[-1] / "manifest.json").exists() and open_ones[-1].exists():
            return open_ones[-1]
        machine.tell(pod, signal.SIGCONT, RANK)
        return None

    return wait_for("a save", stopped)

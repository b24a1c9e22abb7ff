"""Training pods are killed, stopped, suspended in the middle of a checkpoint, and drained from their node."""

import json
import signal
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pytest
from pseudoreal_dev.cluster.kubectl import Kubernetes

from tests.e2e.faults.support.undisturbed import REAL, Undisturbed
from tests.e2e.support import machine
from tests.e2e.support.job import Job, wait_for
from tests.e2e.support.machine import RANK

pytestmark = pytest.mark.e2e

# What is stopped in the middle of a save is found by the clock of the save.
HANG = {"stepSeconds": 10, "checkpointSeconds": 10}
AGAIN = ("ExecutionFailed", "RestartStarted")
SECONDS = 15.0
"""Allowed seconds from a death to the next execution's pods, on a quiet machine."""
STOLEN = 4
"""Allowed slowdown factor of a busy machine."""
BACKOFF = 10
"""Default back-off in seconds."""


def test_a_rank_that_is_killed_is_named_and_all_start_again(
    start: Callable[..., Job], undisturbed: Undisturbed
) -> None:
    """Both workers are killed in turn, with the default grace period and back-off, and with new pods."""
    job = start("killed", spec__pod={}, spec__restart={"avoidNodesAfter": 100, "inPlace": 0})
    _check_killed(job, undisturbed, [1, 0], [STOLEN * SECONDS, STOLEN * (SECONDS + BACKOFF)])


@pytest.mark.long
def test_ranks_that_are_killed_again_and_again_are_named(start: Callable[..., Job], undisturbed: Undisturbed) -> None:
    # A checkpoint between any two of them: without progress, each wait is longer than the one before.
    often = {"spec__checkpoint__everySteps": 1, "spec__restart": {"maxRestarts": 6, "windowSeconds": 1, "inPlace": 0}}
    job = start("killed-often", spec__pod={}, **often)
    _check_killed(job, undisturbed, [1, 0] * 3, [SECONDS] * 6)


def _check_killed(job: Job, undisturbed: Undisturbed, workers: list[int], allowed: list[float]) -> None:
    victims, seconds = [], []
    steps = REAL + 5
    for number, worker in enumerate(workers):
        victim = job.wait_for_steps("real", steps)[worker]
        # More than any execution so far: the next one trains, and has caught up.
        steps = job.steps() + 3
        victims.append(victim["metadata"]["name"])
        killed = time.time()
        machine.tell(victim, signal.SIGKILL, RANK)
        seconds.append(_seconds_until_execution(job, number + 2, killed))
    print(f"seconds from the death of a rank on workers {workers} to the next pods: {seconds}")
    undisturbed.check(job, *AGAIN * len(workers))
    status = job.status()
    assert [(fault.reason, fault.pod) for fault in status.faults][-len(victims) :] == [
        ("PodFailed", name) for name in victims
    ][-len(status.faults) :]
    assert (status.restarts, status.execution) == (len(victims), len(victims) + 1)
    told = [event["message"] for event in job.events() if event["reason"] == "ExecutionFailed"]
    assert all(name in message and "killed" in message for name, message in zip(victims, told, strict=True)), told
    assert all(took <= most for took, most in zip(seconds, allowed, strict=True)), seconds


def _seconds_until_execution(job: Job, number: int, since: float) -> float:
    """Return an upper bound of the seconds until the execution's pods were created; creation times have a resolution of
    one second."""
    made = [pod["metadata"]["creationTimestamp"] for pod in job.wait_for_execution(number)]
    return round(max(datetime.fromisoformat(moment).timestamp() for moment in made) + 1 - since, 1)


@pytest.mark.long
@pytest.mark.parametrize("worker", [0, 1])
def test_a_partner_that_notices_nothing_holds_up_nobody(
    worker: int, start: Callable[..., Job], undisturbed: Undisturbed
) -> None:
    """The partner cannot save without the killed rank, so its grace period of two minutes would be wasted."""
    job = start(f"unnoticed-{worker}", spec__pod={}, spec__restart={"inPlace": 0})
    pods = job.wait_for_steps("real", REAL + 20)
    machine.tell(pods[1 - worker], signal.SIGSTOP, RANK)
    killed = time.time()
    machine.tell(pods[worker], signal.SIGKILL, RANK)
    seconds = _seconds_until_execution(job, 2, killed)
    print(f"seconds from the death of a rank on worker {worker}, its partner stopped, to the next pods: {seconds}")
    undisturbed.check(job, *AGAIN)
    assert [fault.pod for fault in job.status().faults] == [pods[worker]["metadata"]["name"]]
    assert seconds <= SECONDS


@pytest.mark.long
@pytest.mark.parametrize("worker", [0, 1])
def test_a_rank_that_is_stopped_is_named_and_all_start_again(
    worker: int, start: Callable[..., Job], undisturbed: Undisturbed
) -> None:
    job = start(f"stopped-{worker}", spec__hang=HANG, spec__pod={}, spec__restart={})
    victim = job.wait_for_steps("real", REAL + 20)[worker]
    machine.tell(victim, signal.SIGSTOP, RANK)
    job.wait("the verdict", lambda status: bool(status.faults))
    (fault,) = job.status().faults
    seconds = _seconds_until_execution(job, 2, datetime.fromisoformat(fault.time).timestamp())
    print(f"seconds from the verdict on a rank of worker {worker} to the next pods: {seconds}")
    undisturbed.check(job, "HangDetected", *AGAIN)
    where = (victim["metadata"]["name"], victim["spec"]["nodeName"])
    assert fault.reason in ("StepStalled", "CheckpointStalled")
    assert (fault.pod, fault.node) == where
    assert f"rank {worker} on pod {where[0]}, node {where[1]}, is stopped" in job.told("ExecutionFailed")
    assert seconds <= SECONDS


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
    status = job.wait("Suspended", lambda status: status.state == "Suspended")
    assert (status.restarts, status.execution) == (0, 1)
    newest = job.checkpoints("real")[-1]
    assert int(newest.name.removeprefix("real-")) == job.steps()
    assert status.checkpoint is not None
    assert status.checkpoint.latest == newest.name
    assert (saving / "manifest.json").exists(), "the save that was interrupted is committed as well"
    job.suspend(False)
    undisturbed.check(job, "Suspended", "Resumed", "RestartStarted")
    assert (job.status().restarts, job.status().execution) == (0, 2)


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
    assert (status.restarts, status.execution) == (0, 2)
    told = job.told("ExecutionFailed")
    # Kubernetes may have removed them before the operator looks.
    assert "was disrupted (EvictionByEvictionAPI" in told or "were deleted" in told


@pytest.mark.long
def test_a_job_that_was_given_up_is_continued_by_another(start: Callable[..., Job], undisturbed: Undisturbed) -> None:
    failed = start("given-up", spec__restart={"maxRestarts": 0})
    machine.tell(failed.wait_for_steps("real", REAL + 20)[0], signal.SIGKILL, RANK)
    assert failed.wait_for_end().state == "Failed"
    why = failed.condition("Failed")
    assert why.reason == "RestartsExhausted"
    assert f"continueFrom: {failed.folder.name})" in why.message
    job = start("goes-on", spec__checkpoint__continueFrom=failed.folder.name)
    undisturbed.check(job)
    assert len(job.checkpoints("pseudo")) == 1, "nothing was trained again"
    first = json.loads((job.folder / "metrics.jsonl").read_text().splitlines()[0])
    assert first["step"] > REAL + 15


def _stop_in_a_save(job: Job, pod: dict[str, object]) -> Path:
    """Stop the pod's rank while a checkpoint is being written: its folder exists, its manifest does not yet."""
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

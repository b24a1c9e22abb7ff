"""Ranks restart in place, and a spare pod replaces a lost one: both are much faster than new pods."""

import json
import signal
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from tests.e2e.faults.support.undisturbed import REAL, Undisturbed
from tests.e2e.support import machine
from tests.e2e.support.job import PATIENCE_SECONDS, Job
from tests.e2e.support.machine import RANK
from tests.support import patience

pytestmark = pytest.mark.e2e

Json = dict[str, Any]
PART = 1 / 3
"""Allowed share of the time needed by new pods."""


def test_ranks_are_restarted_in_place(start: Callable[..., Job], undisturbed: Undisturbed) -> None:
    job = start("in-place", spec__pod={}, spec__restart={})
    pods = job.wait_for_steps("real", REAL + 5)
    _seconds_to_a_step(job, lambda: _kill(pods[1]))
    undisturbed.check(job, "RestartedInPlace")
    status, victim = job.status(), pods[1]["metadata"]["name"]
    assert (status.restarts, status.execution) == (1, 1)
    assert [(fault.reason, fault.pod, fault.restart_in_place) for fault in status.faults] == [("PodFailed", victim, 1)]
    assert f"Pod {victim} (worker 1): local rank 0 ended without a message" in job.told("RestartedInPlace")
    assert {_uid(pod) for pod in pods} <= {_uid(pod) for pod in job.pods("train")}


@pytest.mark.long
def test_a_restart_in_place_takes_a_third_of_the_time_of_new_pods(start: Callable[..., Job]) -> None:
    """Runs with the default grace period and back-off, on an otherwise idle machine: starting ranks needs processors,
    while new pods mostly wait."""
    seconds = []
    for name, restart in (("in-place-timed", {}), ("anew-timed", {"inPlace": 0})):
        job = start(name, spec__pod={}, spec__restart=restart)
        pods = job.wait_for_steps("real", REAL + 5)
        seconds.append(_seconds_to_a_step(job, partial(_kill, pods[1])))
    in_place, anew = seconds
    print(f"seconds from the death of a rank to the next step: {in_place} in place, {anew} in new pods")
    assert in_place <= PART * anew


@pytest.mark.long
def test_a_rank_blocked_in_a_collective_is_restarted_in_place_too(
    start: Callable[..., Job], undisturbed: Undisturbed
) -> None:
    """The partner learns of the restart from the answer to its next report."""
    job = start("in-place-unnoticed", spec__pod={}, spec__restart={})
    pods = job.wait_for_steps("real", REAL + 5)
    machine.tell(pods[0], signal.SIGSTOP, RANK)
    seconds = _seconds_to_a_step(job, lambda: _kill(pods[1]))
    print(f"seconds from the death of a rank, its partner stopped, to the next step: {seconds}")
    undisturbed.check(job, "RestartedInPlace")
    assert (job.status().restarts, job.status().execution) == (1, 1)


@pytest.mark.long
def test_training_continues_in_new_pods_when_restarts_in_place_are_used_up(
    start: Callable[..., Job], undisturbed: Undisturbed
) -> None:
    job = start("in-place-once", spec__restart={"inPlace": 1, "backoffSeconds": 1, "avoidNodesAfter": 100})
    pods = job.wait_for_steps("real", REAL + 5)
    _seconds_to_a_step(job, lambda: _kill(pods[1]))
    machine.tell(job.running()[0], signal.SIGKILL, RANK)
    undisturbed.check(job, "RestartedInPlace", "ExecutionFailed", "RestartStarted")
    status = job.status()
    assert (status.restarts, status.execution) == (2, 2)
    assert [(fault.execution, fault.restart_in_place) for fault in status.faults] == [(1, 1), (1, None)]


@pytest.mark.parametrize(
    ("lost", "how"), [(0, ()), pytest.param(1, ("--force", "--grace-period=0"), marks=pytest.mark.long)]
)
def test_a_spare_pod_replaces_a_deleted_worker(
    lost: int, how: tuple[str, ...], start: Callable[..., Job], undisturbed: Undisturbed
) -> None:
    job = start(f"spare-{lost}", spec__pod={}, spec__restart={}, spec__phases__1__spares=1)
    pods = job.wait_for_steps("real", REAL + 5)
    assert len(pods) == 3, "the spare one waits"
    seconds = _seconds_to_a_step(job, lambda: _delete(job, pods[lost], *how))
    print(f"seconds from the deletion of a pod to the next step, in the place that a spare one took: {seconds}")
    undisturbed.check(job, "SpareTookOver")
    status = job.status()
    assert (status.restarts, status.execution) == (0, 1)
    assert status.spares is not None
    assert [(place.worker, place.pod) for place in status.spares.places] == [(lost, 2)]
    assert {_uid(pod) for pod in pods if pod != pods[lost]} <= {_uid(pod) for pod in job.pods("train")}


@pytest.mark.long
def test_delink_and_next_phase_succeed_after_a_takeover(start: Callable[..., Job], undisturbed: Undisturbed) -> None:
    """The delink and the next phase keep the execution's number and have worker assignments of their own."""
    job = start(
        "spare-before-delink", spec__pod={}, spec__restart={}, spec__phases__0__workers=2, spec__phases__0__spares=1
    )
    pods = job.wait_for_steps("pseudo", 20)
    _delete(job, pods[1])
    undisturbed.check_events(job, "SpareTookOver")
    status = job.status()
    assert (status.restarts, status.execution) == (0, 1)
    assert status.spares is not None
    assert [(status.spares.phase_name, place.worker, place.pod) for place in status.spares.places] == [("pseudo", 1, 2)]


@pytest.mark.long
def test_a_spare_pod_is_faster_than_new_pods(start: Callable[..., Job]) -> None:
    seconds = []
    for spares in (1, 0):
        job = start(f"timed-{spares}", spec__pod={}, spec__restart={}, spec__phases__1__spares=spares)
        pods = job.wait_for_steps("real", REAL + 5)
        seconds.append(_seconds_to_a_step(job, partial(_delete, job, pods[1])))
    print(f"seconds from the deletion of a pod to the next step: {seconds[0]} by a spare one, {seconds[1]} in new pods")
    assert seconds[0] < seconds[1]


def _kill(pod: Json) -> None:
    machine.tell(pod, signal.SIGKILL, RANK)


def _delete(job: Job, pod: Json, *how: str) -> None:
    job.kubernetes.run("delete", "pod", pod["metadata"]["name"], "--namespace=default", "--wait=false", *how)


def _seconds_to_a_step(job: Job, disturb: Callable[[], None]) -> float:
    """Return the seconds from the disturbance to the first step of a rank started after it."""
    before = _lines(job)
    killed = time.monotonic()
    disturb()

    def is_made_anew() -> bool:
        # Only in the first step of a process is the mean time of its steps the time of all its steps. Neither a
        # smaller step nor fewer seconds would do: new ranks can continue behind the last line, where the old ones had
        # saved at the signal, and on a slow machine their first step takes longer than all steps of the old ones.
        lines = [json.loads(line) for line in _lines(job) if line not in before]
        return any(line["step_seconds"] == line["seconds"] for line in lines)

    patience.wait_for("a step of other ranks", is_made_anew, job.status, PATIENCE_SECONDS, pause=0.05)
    return round(time.monotonic() - killed, 1)


def _lines(job: Job) -> list[str]:
    """Return the complete lines of the metrics, one per step."""
    *lines, _ = (job.folder / "metrics.jsonl").read_text().split("\n")
    return lines


def _uid(pod: Json) -> str:
    return str(pod["metadata"]["uid"])

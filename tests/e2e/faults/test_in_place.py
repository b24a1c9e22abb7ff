"""Ranks that are killed are restarted in place: in the same pods, and much sooner than in new ones."""

import json
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.e2e import machine
from tests.e2e.faults.undisturbed import REAL, Undisturbed
from tests.e2e.job import PATIENCE_SECONDS, Job
from tests.e2e.machine import RANK
from tests.support import patience

pytestmark = pytest.mark.e2e

Json = dict[str, Any]
PART = 1 / 3
"""Share of the time that new pods take."""


def test_ranks_are_restarted_in_place(start: Callable[..., Job], undisturbed: Undisturbed) -> None:
    job = start("in-place", spec__pod={}, spec__restart={})
    pods = job.wait_for_steps("real", REAL + 5)
    _seconds_to_a_step(job, pods[1])
    undisturbed.check(job, "RestartedInPlace")
    status, victim = job.status(), pods[1]["metadata"]["name"]
    assert (status.restarts, status.execution) == (1, 1)
    assert [(fault.reason, fault.pod, fault.restart_in_place) for fault in status.faults] == [("PodFailed", victim, 1)]
    assert f"Pod {victim} (worker 1): local rank 0 ended without a word" in job.told("RestartedInPlace")
    assert {_uid(pod) for pod in pods} <= {_uid(pod) for pod in job.pods("train")}


@pytest.mark.long
def test_that_takes_a_third_of_the_time_of_new_pods(start: Callable[..., Job]) -> None:
    """With the grace period and the back-off that jobs have by default, on a machine that does nothing else: starting
    ranks is work of processors, most of what new pods take is waiting."""
    seconds = []
    for name, restart in (("in-place-timed", {}), ("anew-timed", {"inPlace": 0})):
        job = start(name, spec__pod={}, spec__restart=restart)
        seconds.append(_seconds_to_a_step(job, job.wait_for_steps("real", REAL + 5)[1]))
    in_place, anew = seconds
    print(f"seconds from the death of a rank to the next step: {in_place} in place, {anew} in new pods")
    assert in_place <= PART * anew


@pytest.mark.long
def test_a_partner_that_notices_nothing_is_restarted_as_well(
    start: Callable[..., Job], undisturbed: Undisturbed
) -> None:
    """It hears of it with its next report."""
    job = start("in-place-unnoticed", spec__pod={}, spec__restart={})
    pods = job.wait_for_steps("real", REAL + 5)
    machine.tell(pods[0], signal.SIGSTOP, RANK)
    seconds = _seconds_to_a_step(job, pods[1])
    print(f"seconds from the death of a rank, its partner stopped, to the next step: {seconds}")
    undisturbed.check(job, "RestartedInPlace")
    assert (job.status().restarts, job.status().execution) == (1, 1)


@pytest.mark.long
def test_ranks_whose_restarts_are_used_up_go_on_in_new_pods(
    start: Callable[..., Job], undisturbed: Undisturbed
) -> None:
    job = start("in-place-once", spec__restart={"inPlace": 1, "backoffSeconds": 1, "avoidNodesAfter": 100})
    _seconds_to_a_step(job, job.wait_for_steps("real", REAL + 5)[1])
    machine.tell(job.running()[0], signal.SIGKILL, RANK)
    undisturbed.check(job, "RestartedInPlace", "ExecutionFailed", "RestartStarted")
    status = job.status()
    assert (status.restarts, status.execution) == (2, 2)
    assert [(fault.execution, fault.restart_in_place) for fault in status.faults] == [(1, 1), (1, None)]


def _seconds_to_a_step(job: Job, victim: Json) -> float:
    """Kills the rank of the pod: the seconds until a rank that began after that has made a step."""
    before = _lines(job)
    killed = time.monotonic()
    machine.tell(victim, signal.SIGKILL, RANK)

    def is_made_anew() -> bool:
        # New ranks begin behind the last checkpoint, and make steps again; and ranks count the seconds of their own
        # steps, so that a line that was under way at the kill has more of both. All lines are looked at: between two
        # looks the new ranks may have computed for longer than those before.
        last = json.loads(before[-1])
        lines = [json.loads(line) for line in _lines(job) if line not in before]
        return any(line["step"] <= last["step"] or line["seconds"] < last["seconds"] for line in lines)

    patience.wait_for("a step of other ranks", is_made_anew, job.status, PATIENCE_SECONDS, pause=0.05)
    return round(time.monotonic() - killed, 1)


def _lines(job: Job) -> list[str]:
    """Whole lines of the metrics, one for each step."""
    *lines, _ = (job.folder / "metrics.jsonl").read_text().split("\n")
    return lines


def _uid(pod: Json) -> str:
    return str(pod["metadata"]["uid"])

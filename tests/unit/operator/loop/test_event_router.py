"""Watch events that cause a pass, and events that cost nothing."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import pytest
from pseudoreal_operator import clock
from pseudoreal_operator.cluster.api import Name
from pseudoreal_operator.loop.event_router import (
    ROUTINE_SECONDS,
    STARTING_SECONDS,
    URGENT_SECONDS,
    EventRouter,
    first_pass_delay,
)
from pseudoreal_operator.loop.initial_list import IdleJob
from pseudoreal_operator.loop.queue import WorkQueue

Json = dict[str, Any]

NOW = datetime(2030, 1, 1, tzinfo=UTC)
JOB = Name("default", "llm")
EXECUTION = {"pseudoreal.dev/phase": "real", "pseudoreal.dev/stage": "train", "pseudoreal.dev/execution": "1"}
BACKLOG = None
"""In place of a delay in seconds: the pass is made when there is little else to do."""


class RequestedPasses:
    """A fake queue that records the passes requested since the last `take`."""

    def __init__(self) -> None:
        self.forgotten: list[Name] = []
        self.router = EventRouter(cast(WorkQueue[Name], self))
        self._requested: list[tuple[Name, float | None]] = []

    def add(self, key: Name, after: float = 0.0) -> None:
        self._requested.append((key, after))

    def add_backlog(self, key: Name) -> None:
        self._requested.append((key, BACKLOG))

    def forget(self, key: Name) -> None:
        self.forgotten.append(key)

    def job(self, change: str | None = "MODIFIED", **body: Any) -> list[tuple[Name, float | None]]:
        self.router.job_changed(change, make_job(**body), NOW)
        return self.take()

    def child(
        self, change: str = "MODIFIED", name: str = "llm", kind: str = "Pod", **status: Any
    ) -> list[tuple[Name, float | None]]:
        labels = {"pseudoreal.dev/job-name": name, **EXECUTION}
        metadata = {"namespace": "default", "name": "llm-0", "uid": kind, "labels": labels}
        self.router.child_changed(kind, change, {"metadata": metadata, "status": status})
        return self.take()

    def take(self) -> list[tuple[Name, float | None]]:
        requested, self._requested = self._requested, []
        return requested


def make_job(uid: str = "one", ended: str = "", spec: Json | None = None, **metadata: Any) -> Json:
    conditions = [{"type": ended, "status": "True"}] if ended else []
    status = {"conditions": conditions} | ({"completionTime": clock.to_text(NOW)} if ended else {})
    about = {"namespace": "default", "name": "llm", "uid": uid, "generation": 1}
    return {"metadata": about | metadata, "spec": spec or {}, "status": status}


IDLE = IdleJob("7", 30.0)


@pytest.mark.parametrize(
    ("happens", "is_idle"),
    [
        (lambda passes: passes.job(None, resourceVersion="7"), True),
        (lambda passes: passes.job(None, resourceVersion="8"), False),
        (lambda passes: passes.job("MODIFIED", resourceVersion="8"), False),
        (lambda passes: passes.child(), False),
        (lambda passes: passes.child(name="another"), True),
        (lambda passes: passes.router.invalidate_initial_list(JOB), False),
        (lambda passes: (passes.job(None, resourceVersion="7"), passes.router.child_changes_missed()), False),
        (lambda passes: passes.router.queue_missing(set(), frozenset({JOB})), False),
    ],
)
def test_job_is_idle_until_something_changes(happens: Callable[[RequestedPasses], object], is_idle: bool) -> None:
    passes = RequestedPasses()
    passes.router.store_idle_jobs({JOB: IDLE})
    happens(passes)
    assert [passes.router.take_idle_job(JOB) for _ in range(2)] == [IDLE if is_idle else None, None], (
        "and for one pass only"
    )


def test_job_that_changes_during_the_initial_list_gets_a_pass() -> None:
    passes = RequestedPasses()
    passes.router.begin_initial_list()
    passes.child()
    passes.router.store_idle_jobs({JOB: IDLE})
    assert passes.router.take_idle_job(JOB) is None


def test_job_that_changed_before_the_initial_list_may_be_idle() -> None:
    """A standby receives all events as well."""
    passes = RequestedPasses()
    passes.child()
    passes.router.begin_initial_list()
    passes.router.store_idle_jobs({JOB: IDLE})
    assert passes.router.take_idle_job(JOB) == IDLE


def test_event_of_the_operators_own_status_write_causes_no_pass() -> None:
    passes = RequestedPasses()
    assert passes.job("ADDED") == [(JOB, 0.0)]
    assert passes.job() == []
    assert passes.job(resourceVersion="8", managedFields=[]) == []


def test_status_written_by_a_pass_causes_no_pass_but_other_writes_do() -> None:
    passes = RequestedPasses()
    passes.job(None)
    passes.router.status_written(make_job(ended="Complete"))
    assert passes.job(ended="Complete") == []
    assert passes.job(ended="Complete", generation=2) == [(JOB, 0.0)]


def test_status_written_to_a_deleted_job_is_not_stored() -> None:
    passes = RequestedPasses()
    passes.job(None)
    passes.job("DELETED")
    passes.router.status_written(make_job())
    assert passes.child(phase="Running") == []


def test_repeated_event_of_a_child_causes_no_pass() -> None:
    passes = RequestedPasses()
    passes.job(None)
    assert passes.child(phase="Running") == [(JOB, STARTING_SECONDS)]
    assert passes.child(phase="Running") == []
    passes.router.child_changes_missed()
    assert passes.take() == [(JOB, BACKLOG)]
    assert passes.child(phase="Running") == [], "the list has told it, and the job has a pass"


@pytest.mark.parametrize(
    "change",
    [
        {"generation": 2},
        {"deletionTimestamp": "now"},
        {"ended": "Failed"},
    ],
)
def test_changed_summary_requests_one_pass(change: Json) -> None:
    passes = RequestedPasses()
    passes.job(None)
    assert passes.job(**change) == [(JOB, 0.0)]
    assert passes.job(**change) == []


def test_jobs_found_at_the_start_go_to_the_backlog() -> None:
    passes = RequestedPasses()
    assert passes.job(None) == [(JOB, BACKLOG)]
    later = {"ended": "Failed", "spec": {"deadlines": {"ttlSecondsAfterFinished": 60}}}
    assert passes.job(None, uid="two", **later) == [(JOB, 60.0)]


def test_deleted_job_is_forgotten_and_its_children_cause_no_pass() -> None:
    passes = RequestedPasses()
    passes.job(None)
    assert passes.job("DELETED") == []
    assert passes.forgotten == [JOB]
    assert passes.child() == []


def test_successor_that_appears_before_the_deletion_event_is_kept() -> None:
    passes = RequestedPasses()
    passes.job(None)
    assert passes.job("ADDED", uid="two") == [(JOB, 0.0)]
    assert passes.job("DELETED", uid="one") == [(JOB, 0.0)]
    assert passes.forgotten == []
    assert passes.child() == [(JOB, ROUTINE_SECONDS)]


def test_changed_child_requests_a_pass_over_its_job_only() -> None:
    passes = RequestedPasses()
    passes.job(None)
    assert passes.child() == [(JOB, ROUTINE_SECONDS)]
    assert passes.child("DELETED") == [(JOB, URGENT_SECONDS)]
    assert passes.child(name="another") == []
    passes.router.child_changes_missed()
    assert passes.take() == [(JOB, BACKLOG)]


def test_children_of_an_ended_job_cause_a_pass_only_while_alive() -> None:
    passes = RequestedPasses()
    passes.job(None, ended="Complete")
    assert passes.child(phase="Running") == [(JOB, STARTING_SECONDS)]
    assert passes.child(kind="Job", active=1) == [(JOB, ROUTINE_SECONDS)]
    assert passes.child(phase="Succeeded") == []
    assert passes.child(phase="Failed") == []
    assert passes.child(conditions=[{"type": "Complete", "status": "True"}]) == []
    assert passes.child("DELETED", phase="Running") == []
    passes.router.child_changes_missed()
    assert passes.take() == []


@pytest.mark.parametrize(
    ("body", "after"),
    [
        ({}, 0.0),
        ({"ended": "Complete"}, None),
        ({"ended": "Failed"}, None),
        ({"ended": "Failed", "spec": {"cleanUp": {"children": "Keep"}}}, None),
        ({"ended": "Failed", "spec": {"cleanUp": {"children": "Delete"}}}, 0.0),
        ({"ended": "Failed", "spec": {"deadlines": {"ttlSecondsAfterFinished": 60}}}, 60.0),
        ({"deletionTimestamp": "now"}, None),
    ],
)
def test_delay_of_the_first_pass_depends_on_what_is_left_to_do(body: Json, after: float | None) -> None:
    assert first_pass_delay(make_job(**body), NOW) == after


def test_first_pass_is_due_at_once_when_the_time_to_live_is_over() -> None:
    spec = {"deadlines": {"ttlSecondsAfterFinished": 60}}
    assert first_pass_delay(make_job(ended="Failed", spec=spec), NOW + timedelta(days=1)) == 0.0

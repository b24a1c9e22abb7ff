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


class Asked:
    """A fake queue that records the passes requested since the last look."""

    def __init__(self) -> None:
        self.forgotten: list[Name] = []
        self.router = EventRouter(cast(WorkQueue[Name], self))
        self._asked: list[tuple[Name, float | None]] = []

    def add(self, key: Name, after: float = 0.0) -> None:
        self._asked.append((key, after))

    def add_backlog(self, key: Name) -> None:
        self._asked.append((key, BACKLOG))

    def forget(self, key: Name) -> None:
        self.forgotten.append(key)

    def job(self, change: str | None = "MODIFIED", **body: Any) -> list[tuple[Name, float | None]]:
        self.router.job_changed(change, job(**body), NOW)
        return self.look()

    def child(
        self, change: str = "MODIFIED", name: str = "llm", kind: str = "Pod", **status: Any
    ) -> list[tuple[Name, float | None]]:
        labels = {"pseudoreal.dev/job-name": name, **EXECUTION}
        metadata = {"namespace": "default", "name": "llm-0", "uid": kind, "labels": labels}
        self.router.child_changed(kind, change, {"metadata": metadata, "status": status})
        return self.look()

    def look(self) -> list[tuple[Name, float | None]]:
        asked, self._asked = self._asked, []
        return asked


def job(uid: str = "one", ended: str = "", spec: Json | None = None, **metadata: Any) -> Json:
    conditions = [{"type": ended, "status": "True"}] if ended else []
    status = {"conditions": conditions} | ({"completionTime": clock.to_text(NOW)} if ended else {})
    about = {"namespace": "default", "name": "llm", "uid": uid, "generation": 1}
    return {"metadata": about | metadata, "spec": spec or {}, "status": status}


IDLE = IdleJob("7", 30.0)


@pytest.mark.parametrize(
    ("happens", "is_idle"),
    [
        (lambda asked: asked.job(None, resourceVersion="7"), True),
        (lambda asked: asked.job(None, resourceVersion="8"), False),
        (lambda asked: asked.job("MODIFIED", resourceVersion="8"), False),
        (lambda asked: asked.child(), False),
        (lambda asked: asked.child(name="another"), True),
        (lambda asked: asked.router.invalidate_initial_list(JOB), False),
    ],
)
def test_a_job_is_idle_until_something_changes(happens: Callable[[Asked], object], is_idle: bool) -> None:
    asked = Asked()
    asked.router.store_idle_jobs({JOB: IDLE})
    happens(asked)
    assert [asked.router.take_idle_job(JOB) for _ in range(2)] == [IDLE if is_idle else None, None], (
        "and for one pass only"
    )


def test_a_job_that_changes_during_the_initial_list_gets_a_pass() -> None:
    asked = Asked()
    asked.router.begin_initial_list()
    asked.child()
    asked.router.store_idle_jobs({JOB: IDLE})
    assert asked.router.take_idle_job(JOB) is None


def test_a_job_that_changed_before_the_initial_list_may_be_idle() -> None:
    """A standby receives all events as well."""
    asked = Asked()
    asked.child()
    asked.router.begin_initial_list()
    asked.router.store_idle_jobs({JOB: IDLE})
    assert asked.router.take_idle_job(JOB) == IDLE


def test_the_echo_of_our_own_status_wakes_nobody() -> None:
    asked = Asked()
    assert asked.job("ADDED") == [(JOB, 0.0)]
    assert asked.job() == []
    assert asked.job(resourceVersion="8", managedFields=[]) == []


def test_what_a_pass_has_written_itself_is_no_news_and_what_others_wrote_is() -> None:
    asked = Asked()
    asked.job(None)
    asked.router.status_written(job(ended="Complete"))
    assert asked.job(ended="Complete") == []
    assert asked.job(ended="Complete", generation=2) == [(JOB, 0.0)]


def test_what_a_pass_has_written_of_a_job_that_is_gone_is_forgotten() -> None:
    asked = Asked()
    asked.job(None)
    asked.job("DELETED")
    asked.router.status_written(job())
    assert asked.child(phase="Running") == []


def test_a_child_that_only_repeats_itself_wakes_nobody() -> None:
    asked = Asked()
    asked.job(None)
    assert asked.child(phase="Running") == [(JOB, STARTING_SECONDS)]
    assert asked.child(phase="Running") == []
    asked.router.child_changes_missed()
    asked.look()
    assert asked.child(phase="Running") == [(JOB, STARTING_SECONDS)]


@pytest.mark.parametrize(
    "change",
    [
        {"generation": 2},
        {"deletionTimestamp": "now"},
        {"ended": "Failed"},
    ],
)
def test_a_changed_summary_requests_one_pass(change: Json) -> None:
    asked = Asked()
    asked.job(None)
    assert asked.job(**change) == [(JOB, 0.0)]
    assert asked.job(**change) == []


def test_jobs_that_were_there_before_give_way_to_news() -> None:
    asked = Asked()
    assert asked.job(None) == [(JOB, BACKLOG)]
    later = {"ended": "Failed", "spec": {"deadlines": {"ttlSecondsAfterFinished": 60}}}
    assert asked.job(None, uid="two", **later) == [(JOB, 60.0)]


def test_a_deleted_job_is_forgotten_and_its_children_wake_nobody() -> None:
    asked = Asked()
    asked.job(None)
    assert asked.job("DELETED") == []
    assert asked.forgotten == [JOB]
    assert asked.child() == []


def test_a_job_of_the_same_name_that_comes_before_the_old_one_is_gone_is_not_forgotten() -> None:
    asked = Asked()
    asked.job(None)
    assert asked.job("ADDED", uid="two") == [(JOB, 0.0)]
    assert asked.job("DELETED", uid="one") == [(JOB, 0.0)]
    assert asked.forgotten == []
    assert asked.child() == [(JOB, ROUTINE_SECONDS)]


def test_children_wake_their_job_and_no_other() -> None:
    asked = Asked()
    asked.job(None)
    assert asked.child() == [(JOB, ROUTINE_SECONDS)]
    assert asked.child("DELETED") == [(JOB, URGENT_SECONDS)]
    assert asked.child(name="another") == []
    asked.router.child_changes_missed()
    assert asked.look() == [(JOB, BACKLOG)]


def test_of_an_ended_job_only_what_lives_is_news() -> None:
    asked = Asked()
    asked.job(None, ended="Complete")
    assert asked.child(phase="Running") == [(JOB, STARTING_SECONDS)]
    assert asked.child(kind="Job", active=1) == [(JOB, ROUTINE_SECONDS)]
    assert asked.child(phase="Succeeded") == []
    assert asked.child(phase="Failed") == []
    assert asked.child(conditions=[{"type": "Complete", "status": "True"}]) == []
    assert asked.child("DELETED", phase="Running") == []
    asked.router.child_changes_missed()
    assert asked.look() == []


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
def test_what_a_job_costs_when_the_operator_starts(body: Json, after: float | None) -> None:
    assert first_pass_delay(job(**body), NOW) == after


def test_a_time_to_live_that_is_over_is_over() -> None:
    spec = {"deadlines": {"ttlSecondsAfterFinished": 60}}
    assert first_pass_delay(job(ended="Failed", spec=spec), NOW + timedelta(days=1)) == 0.0

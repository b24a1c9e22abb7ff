"""Metrics of the jobs, as Prometheus reads them, derived from the versions that a watch reports."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from pseudoreal_operator import clock
from pseudoreal_operator.cluster.api import Name
from pseudoreal_operator.loop.job_metrics import JobMetrics

Json = dict[str, Any]
NOW = datetime(2030, 1, 1, tzinfo=UTC)


def ago(**time: float) -> str:
    return clock.to_text(NOW - timedelta(**time))


def make_condition(kind: str, reason: str, status: str = "True") -> Json:
    return {"type": kind, "status": status, "reason": reason, "message": "", "lastTransitionTime": ago(days=1)}


def progressing(reason: str, status: str = "True") -> Json:
    return {"conditions": [make_condition("Progressing", reason, status)]}


def make_fault(execution: int, reason: str) -> Json:
    return {"execution": execution, "time": ago(minutes=1), "reason": reason}


class WatchedMetrics:
    """A collector that receives watch events of jobs, and its exposed metrics."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.metrics = JobMetrics(self._registry, lambda: NOW)

    def report(self, status: Json, change: str | None = "MODIFIED", name: str = "llm", namespace: str = "blue") -> None:
        metadata = {"namespace": namespace, "name": name, "uid": f"{namespace}/{name}"}
        self.metrics.job_changed(change, {"metadata": metadata, "status": status})

    def values(self, name: str) -> dict[tuple[str, ...], float]:
        """Return the values of a metric: label values in the order of the labels' names -> value."""
        families = text_string_to_metric_families(generate_latest(self._registry).decode())
        samples = [sample for family in families for sample in family.samples if sample.name == f"pseudoreal_{name}"]
        return {tuple(value for _, value in sorted(one.labels.items())): one.value for one in samples}


@pytest.fixture
def watched() -> WatchedMetrics:
    return WatchedMetrics()


def test_jobs_gauge_counts_existing_jobs_by_state(watched: WatchedMetrics) -> None:
    watched.report({"state": "Training"})
    watched.report({"state": "Training"}, name="other")
    watched.report({"state": "Complete"}, namespace="green")
    assert watched.values("jobs") == {("blue", "Training"): 2, ("green", "Complete"): 1}
    watched.report({"state": "Restarting"}, name="other")
    watched.report({}, change="DELETED")
    assert watched.values("jobs") == {("blue", "Restarting"): 1, ("green", "Complete"): 1}
    watched.metrics.forget(Name("blue", "other"))
    assert watched.values("jobs") == {("green", "Complete"): 1}


def test_standby_counts_nothing_and_continues_from_the_versions_it_saw(watched: WatchedMetrics) -> None:
    """Two operators that count would show every job twice."""
    watched.metrics.pause()
    watched.report({"state": "Training"})
    watched.report({"state": "Failed", "conditions": [make_condition("Failed", "RestartsExhausted")]})
    watched.report({"state": "Training"}, name="other")
    watched.report({}, name="new")
    shown = ("jobs", "jobs_created_total", "jobs_failed_total", "jobs_completed_total")
    assert [watched.values(name) for name in shown] == [{}] * 4
    watched.metrics.resume()
    assert watched.values("jobs")["blue", "Training"] == 1
    assert watched.values("jobs_created_total") == {("blue",): 1}, "the one that nobody has told anything yet"
    assert watched.values("jobs_completed_total") == {("blue",): 0}, "a zero from which the first is an increase"
    watched.report({"state": "Failed", "conditions": [make_condition("Failed", "RestartsExhausted")]}, name="other")
    assert watched.values("jobs_failed_total") == {("blue", "RestartsExhausted"): 1}


def test_events_before_the_operators_start_are_not_counted_again(watched: WatchedMetrics) -> None:
    """After a restart, the operator first sees jobs in the middle of their lives."""
    ended = {"state": "Failed", "execution": 3, "conditions": [make_condition("Failed", "RestartsExhausted")]}
    watched.report(ended | {"faults": [make_fault(1, "PodFailed")]}, change=None)
    watched.report(ended | {"faults": [make_fault(1, "PodFailed")]})
    assert watched.values("jobs_created_total") == {("blue",): 0}
    assert watched.values("jobs_failed_total") == {}
    assert watched.values("restarts_total") == {}


def test_job_is_counted_once_from_creation_to_completion(watched: WatchedMetrics) -> None:
    watched.report({}, change="ADDED")
    assert (watched.values("jobs_created_total"), watched.values("jobs_completed_total")) == (
        {("blue",): 1},
        {("blue",): 0},
    )
    watched.report({"state": "Training", "execution": 1})
    for _ in range(2):
        watched.report(
            {"state": "Complete", "execution": 1, "conditions": [make_condition("Complete", "AllPhasesDone")]}
        )
    assert watched.values("jobs_created_total") == {("blue",): 1}
    assert watched.values("jobs_completed_total") == {("blue",): 1}
    watched.report({"state": "Training"}, name="bad")
    watched.report({"state": "Failed", "conditions": [make_condition("Failed", "InvalidJob")]}, name="bad")
    assert watched.values("jobs_failed_total") == {("blue", "InvalidJob"): 1}


def test_restarts_are_counted_by_reason_and_by_whether_they_count(watched: WatchedMetrics) -> None:
    watched.report({"execution": 1} | progressing("Training"))
    restarting = progressing("Restarting", "False")
    watched.report({"execution": 2, "faults": [make_fault(1, "OutOfMemory")]} | restarting)
    # The same once more: only the message changed.
    watched.report({"execution": 2, "faults": [make_fault(1, "OutOfMemory")]} | restarting)
    assert watched.values("restarts_total") == {("true", "blue", "OutOfMemory"): 1}
    watched.report({"execution": 2, "faults": [make_fault(1, "OutOfMemory")]} | progressing("Training"))
    disrupted = {"faults": [make_fault(1, "OutOfMemory")], "disruptions": [make_fault(2, "Disrupted")]}
    watched.report({"execution": 3} | disrupted | restarting)
    watched.report({"execution": 3} | disrupted | progressing("Training"))
    # Preempted: no node is to blame, and the status keeps nothing of it.
    watched.report({"execution": 4} | disrupted | restarting)
    # Suspended and resumed: another execution, and no restart.
    watched.report({"execution": 4} | disrupted | progressing("Suspended", "False"))
    watched.report({"execution": 5} | disrupted | progressing("Starting"))
    # Two in one change, of which both count.
    both = {"faults": [make_fault(1, "OutOfMemory"), make_fault(5, "PodFailed"), make_fault(6, "PodFailed")]}
    watched.report({"execution": 7} | both | restarting)
    assert watched.values("restarts_total") == {
        ("true", "blue", "OutOfMemory"): 1,
        ("false", "blue", "Disrupted"): 1,
        ("false", "blue", "Other"): 1,
        ("true", "blue", "PodFailed"): 2,
    }


def test_restarts_in_place_are_counted_one_by_one(watched: WatchedMetrics) -> None:
    watched.report({"execution": 1} | progressing("Training"))
    first, second = (make_fault(1, "PodFailed") | {"restartInPlace": number} for number in (1, 2))
    watched.report({"execution": 1, "faults": [first]} | progressing("Training"))
    watched.report({"execution": 1, "faults": [first, second]} | progressing("Training"))
    assert watched.values("restarts_total") == {("true", "blue", "PodFailed"): 2}
    # One that was counted late, as the execution is preempted.
    third = make_fault(1, "PodFailed") | {"restartInPlace": 3}
    watched.report({"execution": 2, "faults": [first, second, third]} | progressing("Restarting", "False"))
    assert watched.values("restarts_total") == {("true", "blue", "PodFailed"): 3, ("false", "blue", "Other"): 1}


def test_hang_is_counted_whatever_its_action(watched: WatchedMetrics) -> None:
    """The cases stand for the values Restart, Report and Fail of spec.hang.action."""
    for name in ("restart", "report", "fail"):
        watched.report({"execution": 1} | progressing("Training"), name=name)
    watched.report(
        {"execution": 2, "faults": [make_fault(1, "StepStalled")]} | progressing("Restarting", "False"), name="restart"
    )
    for _ in range(2):
        watched.report({"execution": 1} | progressing("CheckpointStalled", "False"), name="report")
    failed = [make_condition("Progressing", "Failed", "False"), make_condition("Failed", "StartStalled")]
    watched.report({"execution": 1, "conditions": failed}, name="fail")
    hangs = {"StepStalled", "CheckpointStalled", "StartStalled"}
    assert watched.values("hangs_total") == {("blue", reason): 1 for reason in hangs}


def test_jobs_that_do_not_progress_are_counted_by_reason(watched: WatchedMetrics) -> None:
    watched.report(progressing("Blocked", "False"))
    watched.report(progressing("Training"), name="other")
    ended = [make_condition("Progressing", "Complete", "False"), make_condition("Complete", "AllPhasesDone")]
    watched.report({"conditions": ended}, name="done")
    assert watched.values("jobs_standing") == {("blue", "Blocked"): 1}


def test_durations_of_phases_and_delinks_are_measured(watched: WatchedMetrics) -> None:
    pseudo: Json = {"name": "pseudo", "state": "Training", "startTime": ago(hours=3)}
    real: Json = {"name": "real", "state": "Pending"}
    watched.report({"phases": [pseudo, real]})
    pseudo |= {"state": "Complete", "completionTime": ago(hours=1)}
    names = {"fromPhase": "pseudo", "toPhase": "real", "id": "pseudo-real-e1"}
    transition = names | {"startTime": ago(minutes=3), "deadline": ago(minutes=-30)}
    watched.report({"phases": [pseudo, real], "transition": transition})
    assert watched.values("phase_duration_seconds_sum") == {(): 2 * 3600}
    assert watched.values("delink_duration_seconds_count") == {(): 0}
    real |= {"state": "Training", "startCheckpoint": "real-10", "startTime": ago(minutes=3)}
    watched.report({"phases": [pseudo, real]})
    watched.report({"phases": [pseudo, real]})
    assert watched.values("delink_duration_seconds_sum") == {(): 180}
    assert watched.values("phase_duration_seconds_count") == {(): 1}


def test_rolled_back_delink_has_no_duration(watched: WatchedMetrics) -> None:
    phases = [{"name": "pseudo", "state": "Complete"}, {"name": "real", "state": "Pending"}]
    names = {"fromPhase": "pseudo", "toPhase": "real", "id": "pseudo-real-e1"}
    watched.report({"phases": phases, "transition": names | {"startTime": ago(hours=1), "deadline": ago(minutes=1)}})
    watched.report({"phases": phases})
    assert watched.values("delink_duration_seconds_count") == {(): 0}


@pytest.mark.parametrize(
    ("status", "age"),
    [
        ({"executionTime": ago(hours=2)}, 7200),
        ({"executionTime": ago(hours=2), "checkpoint": {"latest": "a", "step": 1, "savedTime": ago(minutes=5)}}, 300),
        # The checkpoint is of an earlier execution: what was trained behind it is lost, and does not count.
        ({"executionTime": ago(minutes=1), "checkpoint": {"latest": "a", "step": 1, "savedTime": ago(days=9)}}, 60),
        ({}, None),
    ],
)
def test_checkpoint_age_is_the_training_time_since_the_last_checkpoint(
    watched: WatchedMetrics, status: Json, age: float | None
) -> None:
    watched.report({"state": "Training"} | progressing("Training") | status)
    expected = {} if age is None else {("llm", "blue"): age}
    assert watched.values("checkpoint_age_seconds") == expected
    # One that hangs may lose it as well.
    watched.report({"state": "Training"} | progressing("StepStalled", "False") | status)
    assert watched.values("checkpoint_age_seconds") == expected


@pytest.mark.parametrize(
    ("state", "reason"), [("Training", "Starting"), ("Training", "Unschedulable"), ("Suspended", "Suspended")]
)
def test_job_that_does_not_train_has_no_checkpoint_age(watched: WatchedMetrics, state: str, reason: str) -> None:
    watched.report({"state": "Training", "executionTime": ago(hours=2)} | progressing("Training"))
    watched.report({"state": state, "executionTime": ago(hours=2)} | progressing(reason, "False"))
    assert watched.values("checkpoint_age_seconds") == {}


def test_unreadable_status_is_ignored_by_job_metrics(watched: WatchedMetrics) -> None:
    watched.report({"execution": "many"})
    assert watched.values("jobs") == {}

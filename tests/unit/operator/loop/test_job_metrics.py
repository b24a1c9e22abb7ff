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


def condition(kind: str, reason: str, status: str = "True") -> Json:
    return {"type": kind, "status": status, "reason": reason, "message": "", "lastTransitionTime": ago(days=1)}


def progressing(reason: str, status: str = "True") -> Json:
    return {"conditions": [condition("Progressing", reason, status)]}


def fault(execution: int, reason: str) -> Json:
    return {"execution": execution, "time": ago(minutes=1), "reason": reason}


class Watched:
    """A collector that receives watch events of jobs, and its exposed metrics."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.metrics = JobMetrics(self._registry, lambda: NOW)

    def tell(self, status: Json, change: str | None = "MODIFIED", name: str = "llm", namespace: str = "blue") -> None:
        metadata = {"namespace": namespace, "name": name, "uid": f"{namespace}/{name}"}
        self.metrics.job_changed(change, {"metadata": metadata, "status": status})

    def shows(self, name: str) -> dict[tuple[str, ...], float]:
        """Return the values of a metric: label values in the order of the labels' names -> value."""
        families = text_string_to_metric_families(generate_latest(self._registry).decode())
        samples = [sample for family in families for sample in family.samples if sample.name == f"pseudoreal_{name}"]
        return {tuple(value for _, value in sorted(one.labels.items())): one.value for one in samples}


@pytest.fixture
def watched() -> Watched:
    return Watched()


def test_jobs_by_state_with_those_that_are_gone_left_out(watched: Watched) -> None:
    watched.tell({"state": "Training"})
    watched.tell({"state": "Training"}, name="other")
    watched.tell({"state": "Complete"}, namespace="green")
    assert watched.shows("jobs") == {("blue", "Training"): 2, ("green", "Complete"): 1}
    watched.tell({"state": "Restarting"}, name="other")
    watched.tell({}, change="DELETED")
    assert watched.shows("jobs") == {("blue", "Restarting"): 1, ("green", "Complete"): 1}
    watched.metrics.forget(Name("blue", "other"))
    assert watched.shows("jobs") == {("green", "Complete"): 1}


def test_who_does_not_lead_counts_nothing_and_goes_on_from_what_it_saw(watched: Watched) -> None:
    """Two operators that count would show every job twice."""
    watched.metrics.pause()
    watched.tell({"state": "Training"})
    watched.tell({"state": "Failed", "conditions": [condition("Failed", "RestartsExhausted")]})
    watched.tell({"state": "Training"}, name="other")
    watched.tell({}, name="new")
    shown = ("jobs", "jobs_created_total", "jobs_failed_total", "jobs_completed_total")
    assert [watched.shows(name) for name in shown] == [{}] * 4
    watched.metrics.resume()
    assert watched.shows("jobs")["blue", "Training"] == 1
    assert watched.shows("jobs_created_total") == {("blue",): 1}, "the one that nobody has told anything yet"
    assert watched.shows("jobs_completed_total") == {("blue",): 0}, "a zero from which the first is an increase"
    watched.tell({"state": "Failed", "conditions": [condition("Failed", "RestartsExhausted")]}, name="other")
    assert watched.shows("jobs_failed_total") == {("blue", "RestartsExhausted"): 1}


def test_what_happened_before_is_not_counted_again(watched: Watched) -> None:
    """After a restart, the operator first sees jobs in the middle of their lives."""
    ended = {"state": "Failed", "execution": 3, "conditions": [condition("Failed", "RestartsExhausted")]}
    watched.tell(ended | {"faults": [fault(1, "PodFailed")]}, change=None)
    watched.tell(ended | {"faults": [fault(1, "PodFailed")]})
    assert watched.shows("jobs_created_total") == {("blue",): 0}
    assert watched.shows("jobs_failed_total") == {}
    assert watched.shows("restarts_total") == {}


def test_a_job_is_counted_once_from_its_creation_to_its_end(watched: Watched) -> None:
    watched.tell({}, change="ADDED")
    assert (watched.shows("jobs_created_total"), watched.shows("jobs_completed_total")) == (
        {("blue",): 1},
        {("blue",): 0},
    )
    watched.tell({"state": "Training", "execution": 1})
    for _ in range(2):
        watched.tell({"state": "Complete", "execution": 1, "conditions": [condition("Complete", "AllPhasesDone")]})
    assert watched.shows("jobs_created_total") == {("blue",): 1}
    assert watched.shows("jobs_completed_total") == {("blue",): 1}
    watched.tell({"state": "Training"}, name="bad")
    watched.tell({"state": "Failed", "conditions": [condition("Failed", "InvalidJob")]}, name="bad")
    assert watched.shows("jobs_failed_total") == {("blue", "InvalidJob"): 1}


def test_restarts_by_reason_and_whether_they_count(watched: Watched) -> None:
    watched.tell({"execution": 1} | progressing("Training"))
    restarting = progressing("Restarting", "False")
    watched.tell({"execution": 2, "faults": [fault(1, "OutOfMemory")]} | restarting)
    # The same once more: only the message changed.
    watched.tell({"execution": 2, "faults": [fault(1, "OutOfMemory")]} | restarting)
    assert watched.shows("restarts_total") == {("true", "blue", "OutOfMemory"): 1}
    watched.tell({"execution": 2, "faults": [fault(1, "OutOfMemory")]} | progressing("Training"))
    disrupted = {"faults": [fault(1, "OutOfMemory")], "disruptions": [fault(2, "Disrupted")]}
    watched.tell({"execution": 3} | disrupted | restarting)
    watched.tell({"execution": 3} | disrupted | progressing("Training"))
    # Preempted: no node is to blame, and the status keeps nothing of it.
    watched.tell({"execution": 4} | disrupted | restarting)
    # Suspended and resumed: another execution, and no restart.
    watched.tell({"execution": 4} | disrupted | progressing("Suspended", "False"))
    watched.tell({"execution": 5} | disrupted | progressing("Starting"))
    # Two in one change, of which both count.
    both = {"faults": [fault(1, "OutOfMemory"), fault(5, "PodFailed"), fault(6, "PodFailed")]}
    watched.tell({"execution": 7} | both | restarting)
    assert watched.shows("restarts_total") == {
        ("true", "blue", "OutOfMemory"): 1,
        ("false", "blue", "Disrupted"): 1,
        ("false", "blue", "Other"): 1,
        ("true", "blue", "PodFailed"): 2,
    }


def test_restarts_in_place_are_counted_one_by_one(watched: Watched) -> None:
    watched.tell({"execution": 1} | progressing("Training"))
    first, second = (fault(1, "PodFailed") | {"restartInPlace": number} for number in (1, 2))
    watched.tell({"execution": 1, "faults": [first]} | progressing("Training"))
    watched.tell({"execution": 1, "faults": [first, second]} | progressing("Training"))
    assert watched.shows("restarts_total") == {("true", "blue", "PodFailed"): 2}
    # One that was counted late, as the execution is preempted.
    third = fault(1, "PodFailed") | {"restartInPlace": 3}
    watched.tell({"execution": 2, "faults": [first, second, third]} | progressing("Restarting", "False"))
    assert watched.shows("restarts_total") == {("true", "blue", "PodFailed"): 3, ("false", "blue", "Other"): 1}


def test_a_hang_is_counted_whatever_is_done_about_it(watched: Watched) -> None:
    """The cases stand for the values Restart, Report and Fail of spec.hang.action."""
    for name in ("restart", "report", "fail"):
        watched.tell({"execution": 1} | progressing("Training"), name=name)
    watched.tell(
        {"execution": 2, "faults": [fault(1, "StepStalled")]} | progressing("Restarting", "False"), name="restart"
    )
    for _ in range(2):
        watched.tell({"execution": 1} | progressing("CheckpointStalled", "False"), name="report")
    failed = [condition("Progressing", "Failed", "False"), condition("Failed", "StartStalled")]
    watched.tell({"execution": 1, "conditions": failed}, name="fail")
    hangs = {"StepStalled", "CheckpointStalled", "StartStalled"}
    assert watched.shows("hangs_total") == {("blue", reason): 1 for reason in hangs}


def test_jobs_that_do_not_go_on_by_reason(watched: Watched) -> None:
    watched.tell(progressing("Blocked", "False"))
    watched.tell(progressing("Training"), name="other")
    ended = [condition("Progressing", "Complete", "False"), condition("Complete", "AllPhasesDone")]
    watched.tell({"conditions": ended}, name="done")
    assert watched.shows("jobs_standing") == {("blue", "Blocked"): 1}


def test_durations_of_phases_and_delinks(watched: Watched) -> None:
    pseudo: Json = {"name": "pseudo", "state": "Training", "startTime": ago(hours=3)}
    real: Json = {"name": "real", "state": "Pending"}
    watched.tell({"phases": [pseudo, real]})
    pseudo |= {"state": "Complete", "completionTime": ago(hours=1)}
    names = {"fromPhase": "pseudo", "toPhase": "real", "id": "pseudo-real-e1"}
    transition = names | {"startTime": ago(minutes=3), "deadline": ago(minutes=-30)}
    watched.tell({"phases": [pseudo, real], "transition": transition})
    assert watched.shows("phase_duration_seconds_sum") == {(): 2 * 3600}
    assert watched.shows("delink_duration_seconds_count") == {(): 0}
    real |= {"state": "Training", "startCheckpoint": "real-10", "startTime": ago(minutes=3)}
    watched.tell({"phases": [pseudo, real]})
    watched.tell({"phases": [pseudo, real]})
    assert watched.shows("delink_duration_seconds_sum") == {(): 180}
    assert watched.shows("phase_duration_seconds_count") == {(): 1}


def test_a_delink_that_is_rolled_back_has_no_duration(watched: Watched) -> None:
    phases = [{"name": "pseudo", "state": "Complete"}, {"name": "real", "state": "Pending"}]
    names = {"fromPhase": "pseudo", "toPhase": "real", "id": "pseudo-real-e1"}
    watched.tell({"phases": phases, "transition": names | {"startTime": ago(hours=1), "deadline": ago(minutes=1)}})
    watched.tell({"phases": phases})
    assert watched.shows("delink_duration_seconds_count") == {(): 0}


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
def test_training_that_is_in_no_checkpoint(watched: Watched, status: Json, age: float | None) -> None:
    watched.tell({"state": "Training"} | progressing("Training") | status)
    expected = {} if age is None else {("llm", "blue"): age}
    assert watched.shows("checkpoint_age_seconds") == expected
    # One that hangs may lose it as well.
    watched.tell({"state": "Training"} | progressing("StepStalled", "False") | status)
    assert watched.shows("checkpoint_age_seconds") == expected


@pytest.mark.parametrize(
    ("state", "reason"), [("Training", "Starting"), ("Training", "Unschedulable"), ("Suspended", "Suspended")]
)
def test_what_does_not_train_has_nothing_to_lose(watched: Watched, state: str, reason: str) -> None:
    watched.tell({"state": "Training", "executionTime": ago(hours=2)} | progressing("Training"))
    watched.tell({"state": state, "executionTime": ago(hours=2)} | progressing(reason, "False"))
    assert watched.shows("checkpoint_age_seconds") == {}


def test_a_status_that_cannot_be_read_is_left_to_the_pass(watched: Watched) -> None:
    watched.tell({"execution": "many"})
    assert watched.shows("jobs") == {}

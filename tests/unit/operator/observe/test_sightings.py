"""Times that other machines report are bounded by the operator's own observations."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from pseudoreal_api.status.status import PseudoRealJobStatus
from pseudoreal_api.wire.reports import PodReport
from pseudoreal_operator import clock
from pseudoreal_operator.observe.fetch import MEMORY_BEHIND
from pseudoreal_operator.observe.sightings import Sightings
from pseudoreal_operator.observe.stages import Execution, StageKind
from pseudoreal_operator.observe.view import NO_PODS, ChildJob, JobState, LastReport, Pod, PodPhase, Pods, Termination

JOB = ("default", "uid")
NOW = datetime(2030, 1, 1, tzinfo=UTC)
EXECUTION = Execution("real", StageKind.TRAIN, 1)
RUNS = Pod("p0", EXECUTION, 0, PodPhase.RUNNING)
STATUS = PseudoRealJobStatus(execution=1, execution_time=clock.to_text(NOW - timedelta(minutes=10)))
HOUR = 3600


def after(seconds: float) -> datetime:
    return NOW + timedelta(seconds=seconds)


def pod_ended_at(seconds: float) -> Pod:
    return replace(
        RUNS, phase=PodPhase.FAILED, termination=Termination(1, "Error", "", None, clock.to_text(after(seconds)))
    )


def terminating_pod(seconds: float, grace: int) -> Pod:
    return replace(RUNS, deletion_deadline=clock.to_text(after(seconds)), grace_seconds=grace)


def make_pass(sightings: Sightings, pod: Pod, seconds: float, status: PseudoRealJobStatus = STATUS) -> Pod:
    _, (bounded,) = sightings.with_bounded_times(JOB, status, [], Pods([pod]), after(seconds))
    return bounded


def end_of(pod: Pod) -> float:
    assert pod.termination
    return (clock.from_text(pod.termination.finished) - NOW).total_seconds()


@pytest.mark.parametrize(("reported", "expected"), [(5, 5), (HOUR, 7), (-HOUR, 2), (7, 7), (2, 2)])
def test_end_of_a_pod_lies_between_two_passes(reported: float, expected: float) -> None:
    sightings = Sightings()
    make_pass(sightings, RUNS, 0)
    make_pass(sightings, RUNS, 2)
    assert end_of(make_pass(sightings, pod_ended_at(reported), 7)) == expected
    assert end_of(make_pass(sightings, pod_ended_at(reported), 500)) == expected, "later passes change nothing"


@pytest.mark.parametrize(("reported", "expected"), [(-300, -300), (HOUR, 7), (-HOUR, -600)])
def test_end_of_a_pod_is_not_before_its_request(reported: float, expected: float) -> None:
    """As after a start of the operator: reported times before the first pass are believed."""
    assert end_of(make_pass(Sightings(), pod_ended_at(reported), 7)) == expected
    other = STATUS.model_copy(update={"execution": 2})
    assert end_of(make_pass(Sightings(), pod_ended_at(-HOUR), 7, other)) == -HOUR


@pytest.mark.parametrize(("reporter", "expected"), [("p0", 4), ("its predecessor", -30)])
def test_pod_that_reported_ended_after_its_report(reporter: str, expected: float) -> None:
    """The clock of its node is slow. Passes from memory may be behind, and bound the end less closely."""
    sightings = Sightings()
    report = LastReport(EXECUTION, 0, reporter, first=after(4), last=after(4), report=PodReport())
    given = (RUNS, pod_ended_at(-30), replace(pod_ended_at(-30), ready=True))
    for seconds, pod, reports in zip((0, 6, 9), given, ([], [report], []), strict=True):
        _, (bounded,) = sightings.with_bounded_times(
            JOB, STATUS, [], Pods([pod]), after(seconds), MEMORY_BEHIND, reports.copy
        )
        assert pod is RUNS or end_of(bounded) == expected


def test_grace_period_starts_after_the_last_pass_without_it_even_if_the_pass_was_from_memory() -> None:
    """By a slow clock of the API server, a pod once counted as stuck while its ranks saved."""
    sightings, running, slow = Sightings(), Pods([RUNS]), Pods([terminating_pod(60, 120)])
    for seconds, pods in ((0, running), (5, running), (10, slow)):
        _, (bounded,) = sightings.with_bounded_times(JOB, STATUS, [], pods, after(seconds), MEMORY_BEHIND)
    assert bounded.deletion_deadline == clock.to_text(after(5 + 120))


@pytest.mark.parametrize(("reported", "expected"), [(125, 125), (125 + HOUR, 127), (125 - HOUR, 122)])
def test_start_of_a_grace_period_lies_between_two_passes(reported: float, expected: float) -> None:
    sightings = Sightings()
    make_pass(sightings, RUNS, 2)
    bounded = make_pass(sightings, terminating_pod(reported, 120), 7)
    assert bounded.deletion_deadline == clock.to_text(after(expected))
    assert make_pass(sightings, terminating_pod(reported, 120), 60).deletion_deadline == bounded.deletion_deadline


def test_shortened_grace_period_is_bounded_again() -> None:
    """Kubernetes counts the new period from the first request, which may be long ago."""
    sightings = Sightings()
    make_pass(sightings, RUNS, 0)
    make_pass(sightings, terminating_pod(120, 120), 1)
    make_pass(sightings, terminating_pod(120, 120), 60)
    assert make_pass(sightings, terminating_pod(5, 5), 61).deletion_deadline == clock.to_text(after(65))


def test_unreported_end_is_the_first_pass_that_saw_it() -> None:
    sightings, rejected = Sightings(), replace(RUNS, phase=PodPhase.FAILED)
    assert make_pass(sightings, rejected, 3).ended == clock.to_text(after(3))
    assert make_pass(sightings, rejected, 30).ended == clock.to_text(after(3))


@pytest.mark.parametrize(("reported", "expected"), [(5, 5), (HOUR, 7), (-HOUR, 2)])
def test_times_of_jobs_are_bounded(reported: float, expected: float) -> None:
    sightings, job = Sightings(), ChildJob("j", EXECUTION, JobState.ACTIVE)
    sightings.with_bounded_times(JOB, STATUS, [job], NO_PODS, after(2))
    text = clock.to_text(after(reported))
    later = replace(job, ended=text, held=text, admitted=text, start_time=text)
    (bounded,), _ = sightings.with_bounded_times(JOB, STATUS, [later], NO_PODS, after(7))
    assert {
        bounded.ended,
        bounded.held,
        bounded.admitted,
        bounded.start_time,
    } == {clock.to_text(after(expected))}


def test_deleted_children_are_forgotten() -> None:
    sightings = Sightings()
    make_pass(sightings, RUNS, 0)
    sightings.with_bounded_times(JOB, STATUS, [], NO_PODS, after(1))
    assert end_of(make_pass(sightings, pod_ended_at(-300), 7)) == -300
    make_pass(sightings, RUNS, 8)
    sightings.forget(JOB)
    assert end_of(make_pass(sightings, pod_ended_at(-300), 9)) == -300

"""Reports of pods that are kept, and for how long."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from pseudoreal_api.wire.messages import InPlace
from pseudoreal_api.wire.reports import Activity, PodReport, RankReport, SavedCheckpoint
from pseudoreal_operator.observe.report_store import (
    PROGRESS_SECONDS,
    REQUEUES_PER_SECOND,
    SOON_SECONDS,
    ReportingPod,
    ReportStore,
    updated,
)
from pseudoreal_operator.observe.stages import Execution, StageKind
from pseudoreal_operator.observe.view import LastReport

from tests.unit.operator.observe.support.reports import progress

JOB = ("default", "uid-1")
EXECUTION = Execution("pseudo", StageKind.TRAIN, 1)
REPORTER = ReportingPod(JOB, EXECUTION, 0, "pod")
NOON = datetime(2030, 1, 1, 12, tzinfo=UTC)
SAVED = SavedCheckpoint(name="pseudo-4", step=4, seconds=3)


def after(seconds: float) -> datetime:
    return NOON + timedelta(seconds=seconds)


def at(step: int, activity: Activity = "computing", saving_seconds: float | None = None, **says: Any) -> PodReport:
    sign = RankReport(rank=0, activity=activity, seconds=0, step=step, saving_seconds=saving_seconds)
    return PodReport(ranks=[sign], **says)


def told(*reports: PodReport) -> LastReport:
    """Return the state of a pod after these reports, which came one per second."""
    last_report = None
    for second, report in enumerate(reports):
        last_report = updated(last_report, REPORTER, report, after(second))
    assert last_report
    return last_report


@pytest.fixture
def report_store() -> ReportStore:
    report_store = ReportStore()
    report_store.follow(JOB, frozenset())
    return report_store


def test_the_first_report_of_a_pod_that_starts() -> None:
    last_report = told(at(0, "starting"))
    assert (last_report.first, last_report.last, last_report.begun, last_report.progressed) == (NOON, NOON, None, None)


def test_a_pod_has_begun_when_one_of_its_ranks_is_at_work() -> None:
    ranks = [RankReport(rank=rank, activity="starting", seconds=0, step=0) for rank in (0, 1)]
    half = PodReport(ranks=[ranks[0], ranks[1].model_copy(update={"activity": "computing"})])
    last_report = told(PodReport(ranks=ranks), half, at(1))
    assert last_report.begun == after(1)
    assert last_report.first == NOON


IN_PLACE = InPlace(restarts=1, peer_lost=False, message="killed")


def test_what_ranks_did_before_they_were_restarted_in_place_is_forgotten() -> None:
    last_report = told(at(4), at(5), PodReport(in_place=IN_PLACE), at(0, "starting", in_place=IN_PLACE))
    assert (last_report.first, last_report.begun, last_report.progressed) == (after(2), None, None)
    assert last_report.restarted == IN_PLACE
    again = told(at(5), at(4, in_place=IN_PLACE), at(5, in_place=IN_PLACE))
    assert (again.begun, again.progressed) == (after(1), after(2))


def test_a_pod_hears_how_often_another_one_has_restarted_its_ranks(report_store: ReportStore) -> None:
    other = ReportingPod(JOB, EXECUTION, 1, "other")
    later = ReportingPod(JOB, EXECUTION._replace(number=2), 1, "later")
    report_store.store(REPORTER, at(5), NOON)
    assert report_store.restarts_in_place(REPORTER, NOON) == 0
    report_store.store(other, PodReport(in_place=IN_PLACE), NOON)
    assert (report_store.restarts_in_place(REPORTER, NOON), report_store.restarts_in_place(other, NOON)) == (1, 1)
    assert report_store.restarts_in_place(later, NOON) == 0
    assert report_store.restarts_in_place(REPORTER, after(21)) == 0, "a queue may have taken that pod back"


def test_a_restart_in_place_wakes_the_job_soon() -> None:
    woken: list[float] = []
    report_store = ReportStore()
    report_store.follow(JOB, frozenset(), woken.append)
    for report in (at(5), PodReport(in_place=IN_PLACE), at(4, "starting", in_place=IN_PLACE)):
        woken.clear()
        report_store.store(REPORTER, report, NOON)
        assert woken == [SOON_SECONDS]


def test_ranks_that_wait_for_each_other_before_the_first_step_have_not_begun() -> None:
    assert told(at(100, "starting"), at(100, "waiting"), at(100, "starting")).begun is None
    assert told(at(100, "starting"), at(101, "waiting")).begun == after(1)


def test_an_operator_that_comes_later_sees_that_steps_were_made() -> None:
    sign = RankReport(rank=0, activity="waiting", seconds=0, step=7, busy_seconds=0.5)
    assert told(PodReport(ranks=[sign])).begun == NOON


def test_a_save_counts_as_progress_while_it_goes_on() -> None:
    last_report = told(at(4), at(4, saving_seconds=1), at(4, saving_seconds=2), at(4), at(4))
    assert last_report.progressed == after(2)


def test_steps_that_a_pod_resumes_at_are_no_steps_that_it_made() -> None:
    last_report = told(at(100, "starting"), at(100))
    assert (last_report.begun, last_report.progressed) == (after(1), None)


def test_the_newest_step_is_remembered_by_its_moment() -> None:
    last_report = told(at(1), at(2), at(2), at(2))
    assert (last_report.progressed, last_report.last) == (after(1), after(3))


def test_a_pod_without_ranks_makes_no_steps() -> None:
    last_report = told(PodReport(), PodReport())
    assert (last_report.begun, last_report.progressed) == (None, None)


def test_what_a_report_does_not_repeat_stays_known() -> None:
    last_report = told(at(4, progress=progress(4), checkpoint=SAVED), at(5))
    assert last_report.report.ranks[0].step == 5
    assert last_report.report.progress == progress(4)
    assert last_report.report.checkpoint == SAVED


def test_each_pod_and_each_execution_has_its_own_entry(report_store: ReportStore) -> None:
    second = Execution("pseudo", StageKind.TRAIN, 2)
    for reporter in (REPORTER, ReportingPod(JOB, EXECUTION, 1, "other"), ReportingPod(JOB, second, 0, "later")):
        report_store.store(reporter, at(reporter.index), NOON)
    assert [
        (last_report.execution, last_report.index) for last_report in report_store.of_job(JOB, {EXECUTION, second})
    ] == [
        (EXECUTION, 0),
        (EXECUTION, 1),
        (second, 0),
    ]


def test_the_next_pod_of_an_execution_begins_anew(report_store: ReportStore) -> None:
    """A queue took the first pod back, and has admitted the job again since."""
    report_store.store(REPORTER, at(7), NOON)
    report_store.listen(JOB, REPORTER, NOON)
    later = replace(REPORTER, pod="its-successor")
    report_store.store(later, at(0, "starting"), after(9000))
    (last_report,) = report_store.of_job(JOB, {EXECUTION})
    assert (last_report.pod, last_report.first, last_report.begun, last_report.progressed) == (
        "its-successor",
        after(9000),
        None,
        None,
    )
    report_store.listen(JOB, later, after(9000))
    assert report_store.most_silent(after(9021)) == later


def test_executions_that_are_not_asked_for_are_forgotten(report_store: ReportStore) -> None:
    report_store.store(REPORTER, at(1), NOON)
    assert report_store.of_job(JOB, set()) == ()
    assert report_store.of_job(JOB, {EXECUTION}) == ()


def test_a_job_that_is_not_followed_is_not_heard() -> None:
    report_store = ReportStore()
    assert not report_store.store(REPORTER, at(1), NOON)
    report_store.read_log(REPORTER, progress(1), NOON)
    report_store.follow(JOB, frozenset())
    assert report_store.of_job(JOB, {EXECUTION}) == ()


def test_pods_that_outlive_their_job_leave_nothing_behind(report_store: ReportStore) -> None:
    report_store.store(REPORTER, at(1), NOON)
    report_store.forget(JOB)
    report_store.store(REPORTER, at(2), NOON)
    report_store.follow(JOB, frozenset())
    assert report_store.of_job(JOB, {EXECUTION}) == ()


def test_a_pod_in_another_namespace_does_not_report_for_the_job(report_store: ReportStore) -> None:
    stranger = replace(REPORTER, job=("elsewhere", JOB[1]))
    assert not report_store.store(stranger, at(1), NOON)
    report_store.follow(JOB, frozenset({"pseudo"}))
    assert report_store.of_job(JOB, {EXECUTION}) == ()
    assert not report_store.answer(stranger, NOON).finish_phase


def test_a_log_counts_where_it_is_ahead_of_the_reports(report_store: ReportStore) -> None:
    report_store.read_log(REPORTER, progress(3), NOON)
    report_store.read_log(REPORTER, progress(3), after(9))
    (last_report,) = report_store.of_job(JOB, {EXECUTION})
    assert (last_report.begun, last_report.last, last_report.report.progress) == (NOON, NOON, progress(3))
    report_store.store(REPORTER, at(7), after(10))
    report_store.read_log(REPORTER, progress(6), after(20))
    assert report_store.of_job(JOB, {EXECUTION})[0].last == after(10)
    report_store.read_log(REPORTER, progress(8), after(30))
    (last_report,) = report_store.of_job(JOB, {EXECUTION})
    assert (last_report.progressed, last_report.report.progress) == (after(30), progress(8))


def test_the_wish_to_finish_is_for_one_phase_and_ends_with_the_request(report_store: ReportStore) -> None:
    real = replace(REPORTER, execution=Execution("real", StageKind.TRAIN, 1))
    assert not report_store.answer(REPORTER, NOON).finish_phase
    report_store.follow(JOB, frozenset({"pseudo"}))
    assert report_store.answer(REPORTER, NOON).finish_phase
    assert not report_store.answer(real, NOON).finish_phase
    report_store.follow(JOB, frozenset())
    assert not report_store.answer(REPORTER, NOON).finish_phase


def listening(at: datetime = NOON) -> ReportStore:
    report_store = ReportStore()
    report_store.follow(JOB, frozenset())
    report_store.listen(JOB, REPORTER, at)
    return report_store


def looks(report_store: ReportStore, seconds: range) -> list[int]:
    """Return the seconds at which the log of the pod is read, if the log has nothing to say."""
    return [second for second in seconds if report_store.most_silent(after(second)) == REPORTER]


def test_the_log_of_a_pod_that_stays_silent_is_looked_at_ever_more_rarely() -> None:
    assert looks(listening(), range(0, 2000)) == [21, 81, 162, 324, 648, 1296]


def test_no_log_is_read_of_a_pod_that_reports() -> None:
    report_store = listening()
    for second in range(0, 600, 10):
        report_store.store(REPORTER, at(1), after(second))
        assert looks(report_store, range(second, second + 10)) == []
    assert looks(report_store, range(600, 800)) == [611, 671, 752], "until it falls silent"


def test_a_log_that_tells_of_steps_is_looked_at_every_minute() -> None:
    report_store, found = listening(), []
    for second in range(300):
        if report_store.most_silent(after(second)):
            found.append(second)
            report_store.read_log(REPORTER, progress(second), after(second))
    assert found == [21, 81, 141, 201, 261]


def test_nobody_is_listened_to_where_no_pod_runs_and_each_execution_has_its_own_silence() -> None:
    report_store = listening()
    report_store.listen(JOB, None, after(1))
    assert looks(report_store, range(100)) == []
    report_store.listen(JOB, REPORTER, after(100))
    report_store.listen(JOB, REPORTER, after(115))
    assert looks(report_store, range(100, 130)) == [121], "since it runs"
    stranger = ("elsewhere", JOB[1])
    report_store.listen(stranger, replace(REPORTER, job=stranger), NOON)
    assert looks(report_store, range(500, 501)) == [500], "of the job that is followed"
    report_store.forget(JOB)
    assert report_store.most_silent(after(900)) is None


def test_one_pod_at_a_time_the_longest_unread_first() -> None:
    report_store = ReportStore()
    for number in range(3):
        job = ("default", str(number))
        report_store.follow(job, frozenset())
        report_store.listen(job, ReportingPod(job, EXECUTION, 0, f"pod-{number}"), after(-number))
    read = [report_store.most_silent(after(100 + second)) for second in range(4)]
    assert [silent.pod if silent else None for silent in read] == ["pod-2", "pod-1", "pod-0", None]


def test_thousands_of_jobs_together_are_not_woken_more_often_for_progress() -> None:
    report_store, woken = ReportStore(), list[float]()
    for number in range(1000):
        report_store.follow(("default", str(number)), frozenset(), woken.append)
    for step in range(3):
        report_store.store(replace(REPORTER, job=("default", "7")), at(step, "computing" if step else "starting"), NOON)
    assert woken == [SOON_SECONDS, SOON_SECONDS, 1000 / REQUEUES_PER_SECOND], "what begins is told at once"
    woken.clear()
    report_store.store(replace(REPORTER, job=("default", "8")), at(5), NOON)
    assert woken == [1000 / REQUEUES_PER_SECOND], "it trained before, and was not heard"


@pytest.mark.parametrize(
    ("reports", "wakes"),
    [
        ([at(0, "starting")], [SOON_SECONDS]),
        ([at(0, "starting"), at(0, "starting")], [SOON_SECONDS]),
        ([at(0, "starting"), at(0), at(0)], [SOON_SECONDS] * 2),
        ([at(1), at(2), at(2)], [SOON_SECONDS, PROGRESS_SECONDS]),
        ([at(1), at(1, checkpoint=SAVED), at(1)], [SOON_SECONDS, PROGRESS_SECONDS]),
        ([at(1), at(1, "ended"), at(1, "ended")], [SOON_SECONDS] * 2),
    ],
)
def test_a_job_is_woken_by_what_is_new(reports: list[PodReport], wakes: list[float]) -> None:
    report_store, woken = ReportStore(), list[float]()
    report_store.follow(JOB, frozenset(), woken.append)
    for report in reports:
        report_store.store(REPORTER, report, NOON)
    assert woken == wakes

"""Reports of pods that are kept, and for how long."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pseudoreal_api.wire.messages import InPlace
from pseudoreal_api.wire.reports import Activity, Membership, PodReport, RankReport, SavedCheckpoint
from pseudoreal_operator.observe.report_store import (
    PROGRESS_SECONDS,
    REQUEUES_PER_SECOND,
    SOON_SECONDS,
    ReportingPod,
    ReportStore,
    merge_report,
)
from pseudoreal_operator.observe.stages import Execution, StageKind
from pseudoreal_operator.observe.view import LastReport

from tests.support.depth import DEPTH
from tests.unit.operator.observe.support.reports import LAYOUT, PODS, progress

JOB = ("default", "uid-1")
EXECUTION = Execution("pseudo", StageKind.TRAIN, 1)
REPORTER = ReportingPod(JOB, EXECUTION, 0, "pod")
NOON = datetime(2030, 1, 1, 12, tzinfo=UTC)
SAVED = SavedCheckpoint(name="pseudo-4", step=4, seconds=3)


def after(seconds: float) -> datetime:
    return NOON + timedelta(seconds=seconds)


def report_at(
    step: int, activity: Activity = "computing", saving_seconds: float | None = None, **says: Any
) -> PodReport:
    sign = RankReport(rank=0, activity=activity, seconds=0, step=step, saving_seconds=saving_seconds)
    return PodReport(ranks=[sign], **says)


def state_after(*reports: PodReport) -> LastReport:
    """Return the state of a pod after these reports, which came one per second."""
    last_report = None
    for second, report in enumerate(reports):
        last_report = merge_report(last_report, REPORTER, report, after(second))
    assert last_report
    return last_report


@pytest.fixture
def report_store() -> ReportStore:
    report_store = ReportStore()
    report_store.follow(JOB, PODS)
    return report_store


def test_first_report_of_a_starting_pod_is_stored() -> None:
    last_report = state_after(report_at(0, "starting"))
    assert (last_report.first, last_report.last, last_report.training_since, last_report.progressed) == (
        NOON,
        NOON,
        None,
        None,
    )


def test_pod_trains_when_one_of_its_ranks_works() -> None:
    ranks = [RankReport(rank=rank, activity="starting", seconds=0, step=0) for rank in (0, 1)]
    half = PodReport(ranks=[ranks[0], ranks[1].model_copy(update={"activity": "computing"})])
    last_report = state_after(PodReport(ranks=ranks), half, report_at(1))
    assert last_report.training_since == after(1)
    assert last_report.first == NOON


IN_PLACE = InPlace(restarts=1, peer_lost=False, message="killed")


def test_restart_in_place_resets_the_state_of_a_pod() -> None:
    last_report = state_after(
        report_at(4), report_at(5), PodReport(in_place=IN_PLACE), report_at(0, "starting", in_place=IN_PLACE)
    )
    assert (last_report.first, last_report.training_since, last_report.progressed) == (after(2), None, None)
    assert last_report.restarted == IN_PLACE
    again = state_after(report_at(5), report_at(4, in_place=IN_PLACE), report_at(5, in_place=IN_PLACE))
    assert (again.training_since, again.progressed) == (after(1), after(2))


def test_answer_has_the_restarts_in_place_of_other_pods(report_store: ReportStore) -> None:
    other = ReportingPod(JOB, EXECUTION, 1, "other")
    later = ReportingPod(JOB, EXECUTION._replace(number=2), 1, "later")
    report_store.store(REPORTER, report_at(5), NOON)
    assert report_store.restarts_in_place(REPORTER, NOON) == 0
    report_store.store(other, PodReport(in_place=IN_PLACE), NOON)
    assert (report_store.restarts_in_place(REPORTER, NOON), report_store.restarts_in_place(other, NOON)) == (1, 1)
    assert report_store.restarts_in_place(later, NOON) == 0
    assert report_store.restarts_in_place(REPORTER, after(21)) == 0, "a queue may have taken that pod back"


REPORTS = st.tuples(st.integers(0, 3), st.none() | st.integers(1, 3), st.sampled_from([0.0, 1.0, 9.0, 21.0]))
"""Completion index of the pod, number of its restarts in place, seconds since the report before."""


@settings(max_examples=DEPTH.of(100, 2000), derandomize=not DEPTH.is_deep, deadline=None)
@given(told=st.lists(REPORTS, max_size=12), later=st.sampled_from([0.0, 12.0, 20.0, 20.5]))
def test_restarts_in_place_are_the_most_of_all_pods_that_report(
    told: list[tuple[int, int | None, float]], later: float
) -> None:
    """Numbers may become smaller: a queue may have replaced the pod."""
    report_store, second, newest = ReportStore(), 0.0, dict[int, tuple[int, float]]()
    report_store.follow(JOB, PODS)
    for index, restarts, wait in told:
        second += wait
        in_place = None if restarts is None else InPlace(restarts=restarts, peer_lost=False, message="killed")
        reporter = ReportingPod(JOB, EXECUTION, index, f"pod-{index}")
        report_store.store(reporter, report_at(1, in_place=in_place), after(second))
        newest[index] = restarts or 0, second
    now = second + later
    expected = max((number for number, last in newest.values() if now - last <= 20), default=0)
    assert report_store.restarts_in_place(REPORTER, after(now)) == expected


def test_time_of_the_first_word_of_a_membership_is_kept_until_the_pod_begins_it(report_store: ReportStore) -> None:
    woken: list[float] = []

    def told(report: PodReport, restart: int, seconds: float) -> tuple[int, datetime] | None:
        members = {EXECUTION: Membership(restart=restart, own_restarts=1, takeovers=[])}
        report_store.follow(JOB, PODS, frozenset(), members=members)
        report_store.store(REPORTER, report, after(seconds))
        report_store.follow(JOB, PODS, frozenset(), woken.append, members)
        assert report_store.answer(REPORTER, after(seconds)).membership == members[EXECUTION]
        (last_report,) = report_store.of_job(JOB)
        return last_report.told_membership

    assert told(report_at(5), 2, 0) == (2, after(0))
    assert told(report_at(5), 2, 5) == (2, after(0))
    assert told(report_at(5), 4, 10) == (4, after(10))
    assert woken == [PROGRESS_SECONDS] * 2, "a pass takes up the clock"
    assert told(PodReport(in_place=InPlace(restarts=4, peer_lost=True, message="met")), 4, 15) is None


def test_progress_in_the_log_keeps_the_restarts_of_a_pod(report_store: ReportStore) -> None:
    """Otherwise the pod would be no member any more, and its progress would move no clock."""
    report_store.store(REPORTER, report_at(5, in_place=IN_PLACE), NOON)
    report_store.read_log(REPORTER, progress(9), after(60))
    (last_report,) = report_store.of_job(JOB)
    assert (last_report.restarts_in_place, last_report.progressed) == (1, after(60))


def test_restart_in_place_requeues_the_job_soon() -> None:
    woken: list[float] = []
    report_store = ReportStore()
    report_store.follow(JOB, PODS, frozenset(), woken.append)
    for report in (report_at(5), PodReport(in_place=IN_PLACE), report_at(4, "starting", in_place=IN_PLACE)):
        woken.clear()
        report_store.store(REPORTER, report, NOON)
        assert woken == [SOON_SECONDS]


def test_ranks_that_wait_before_the_first_step_do_not_train() -> None:
    assert (
        state_after(report_at(100, "starting"), report_at(100, "waiting"), report_at(100, "starting")).training_since
        is None
    )
    assert state_after(report_at(100, "starting"), report_at(101, "waiting")).training_since == after(1)


def test_new_operator_sees_earlier_steps_in_a_report() -> None:
    sign = RankReport(rank=0, activity="waiting", seconds=0, step=7, busy_seconds=0.5)
    assert state_after(PodReport(ranks=[sign])).training_since == NOON


def test_a_save_counts_as_progress_while_it_goes_on() -> None:
    last_report = state_after(
        report_at(4), report_at(4, saving_seconds=1), report_at(4, saving_seconds=2), report_at(4), report_at(4)
    )
    assert last_report.progressed == after(2)


def test_step_of_a_resumed_checkpoint_is_no_progress() -> None:
    last_report = state_after(report_at(100, "starting"), report_at(100))
    assert (last_report.training_since, last_report.progressed) == (after(1), None)


def test_time_of_the_newest_step_is_kept() -> None:
    last_report = state_after(report_at(1), report_at(2), report_at(2), report_at(2))
    assert (last_report.progressed, last_report.last) == (after(1), after(3))


def test_a_pod_without_ranks_makes_no_steps() -> None:
    last_report = state_after(PodReport(), PodReport())
    assert (last_report.training_since, last_report.progressed) == (None, None)


def test_progress_and_checkpoint_stay_if_a_report_omits_them() -> None:
    last_report = state_after(report_at(4, progress=progress(4), checkpoint=SAVED), report_at(5))
    assert last_report.report.ranks[0].step == 5
    assert last_report.report.progress == progress(4)
    assert last_report.report.checkpoint == SAVED


def test_each_pod_and_each_execution_has_its_own_entry(report_store: ReportStore) -> None:
    second = Execution("pseudo", StageKind.TRAIN, 2)
    for reporter in (REPORTER, ReportingPod(JOB, EXECUTION, 1, "other"), ReportingPod(JOB, second, 0, "later")):
        report_store.store(reporter, report_at(reporter.index), NOON)
    assert [(last_report.execution, last_report.index) for last_report in report_store.of_job(JOB)] == [
        (EXECUTION, 0),
        (EXECUTION, 1),
        (second, 0),
    ]


def test_next_pod_of_a_worker_starts_with_no_state(report_store: ReportStore) -> None:
    """A queue took the first pod back, and has admitted the job again since."""
    report_store.store(REPORTER, report_at(7), NOON)
    report_store.set_rank_zero_pod(JOB, REPORTER, NOON)
    later = replace(REPORTER, pod="its-successor")
    report_store.store(later, report_at(0, "starting"), after(9000))
    (last_report,) = report_store.of_job(JOB)
    assert (last_report.pod, last_report.first, last_report.training_since, last_report.progressed) == (
        "its-successor",
        after(9000),
        None,
        None,
    )
    report_store.set_rank_zero_pod(JOB, later, after(9000))
    assert report_store.most_silent(after(9021)) == later


def test_reports_of_other_executions_are_forgotten(report_store: ReportStore) -> None:
    report_store.store(REPORTER, report_at(1), NOON)
    report_store.forget_other_executions(JOB, {EXECUTION._replace(number=2)})
    assert report_store.of_job(JOB) == ()


def test_report_of_an_unfollowed_job_is_rejected() -> None:
    report_store = ReportStore()
    assert not report_store.store(REPORTER, report_at(1), NOON)
    report_store.read_log(REPORTER, progress(1), NOON)
    report_store.follow(JOB, PODS)
    assert report_store.of_job(JOB) == ()


def test_pods_of_a_forgotten_job_store_nothing(report_store: ReportStore) -> None:
    report_store.store(REPORTER, report_at(1), NOON)
    report_store.forget(JOB)
    report_store.store(REPORTER, report_at(2), NOON)
    report_store.follow(JOB, PODS)
    assert report_store.of_job(JOB) == ()


def test_a_pod_in_another_namespace_does_not_report_for_the_job(report_store: ReportStore) -> None:
    stranger = replace(REPORTER, job=("elsewhere", JOB[1]))
    assert not report_store.store(stranger, report_at(1), NOON)
    report_store.follow(JOB, PODS, frozenset({"pseudo"}))
    assert report_store.of_job(JOB) == ()
    assert not report_store.answer(stranger, NOON).finish_phase


def report_of_ranks(count: int, **says: Any) -> PodReport:
    ranks = [RankReport(rank=rank, activity="waiting", seconds=0, step=1) for rank in range(count)]
    return PodReport(ranks=ranks, **says)


def test_pod_has_one_report_whatever_index_it_claims() -> None:
    """Its owner changes the annotation with the index before each report."""
    report_store, woken, report = ReportStore(), list[float](), report_of_ranks(64)
    report_store.follow(JOB, {"pseudo": 10_000}, frozenset(), woken.append)
    indices = [index for index in range(100_000) if report_store.store(replace(REPORTER, index=index), report, NOON)]
    assert indices == [*range(10_000)]
    assert [one.index for one in report_store.of_job(JOB)] == [9_999]
    assert woken == [SOON_SECONDS], "the others tell a pass nothing"
    assert report_store.restarts_in_place(REPORTER, NOON) == 0


def test_pod_has_one_report_whatever_execution_it_claims(report_store: ReportStore) -> None:
    for number in range(1, 1000):
        reporter = replace(REPORTER, execution=EXECUTION._replace(number=number))
        report_store.store(reporter, report_at(1, in_place=IN_PLACE), NOON)
        later = replace(reporter, execution=EXECUTION._replace(number=10_000 + number))
        assert report_store.answer(later, NOON).restarts_in_place == 0
    assert [*report_store._jobs[JOB].reports] == [EXECUTION._replace(number=999)]


def test_pod_that_the_job_cannot_have_is_not_heard() -> None:
    report_store = store_with_rank_zero_pod()
    report_store.follow(JOB, {"pseudo": 2, "real": 4}, frozenset())
    strangers = [replace(REPORTER, index=2), replace(REPORTER, execution=Execution("mine", StageKind.TRAIN, 1))]
    for stranger in strangers:
        assert not report_store.store(stranger, report_at(1), NOON)
    assert not report_store.has_reported(JOB)
    assert report_store.store(replace(REPORTER, index=1), report_at(1), NOON)
    assert report_store.has_reported(JOB)


MOST = 2**12
FULL = MOST // 8 // 65
"""Number of pods of a namespace whose reports of 64 ranks are kept whole."""
SHORT = (MOST // 4 - FULL * 65) // 2
"""Number of further pods whose reports are kept with one rank."""


@pytest.fixture
def few_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pseudoreal_operator.observe.report_store.MOST_KEPT", MOST)


@pytest.mark.usefixtures("few_are_kept")
def test_reports_of_one_namespace_leave_room_for_others(report_store: ReportStore) -> None:
    woken, other, report = list[float](), ("elsewhere", "uid-2"), report_of_ranks(64)
    pods = [ReportingPod(JOB, EXECUTION, index, f"pod-{index}") for index in range(1000)]
    report_store.follow(other, PODS)
    for pod in pods[: FULL + SHORT]:
        report_store.store(pod, report, NOON)
    assert not report_store.refuses_reports(JOB, NOON)
    report_store.follow(JOB, PODS, frozenset({"pseudo"}), woken.append)
    for pod in pods[FULL + SHORT :]:
        assert report_store.store(pod, report, NOON)
        assert report_store.answer(pod, NOON).finish_phase, "an answer needs no room"
    assert woken == []
    assert [len(one.report.ranks) for one in report_store.of_job(JOB)] == [64] * FULL + [1] * SHORT
    assert report_store.refuses_reports(JOB, after(19))
    assert not report_store.refuses_reports(JOB, after(21))
    assert report_store.store(replace(pods[0], job=other), report, NOON)
    assert len(report_store.of_job(other)) == 1
    assert not report_store.refuses_reports(other, NOON)


def test_reports_become_shorter_until_those_of_all_pods_have_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """As 16,384 pods do: the first reports are kept whole at first."""
    monkeypatch.setattr("pseudoreal_operator.observe.report_store.MOST_KEPT", MOST)
    report_store, pods = store_with_rank_zero_pod(), MOST // 8
    for _ in range(2):
        for index in range(pods):
            report = report_of_ranks(8, in_place=IN_PLACE, layout=LAYOUT)
            report_store.store(ReportingPod(JOB, EXECUTION, index, f"pod-{index}"), report, NOON)
    assert len(report_store.of_job(JOB)) == pods
    assert report_store.restarts_in_place(REPORTER, NOON) == 1


SUSPECTED = [
    [("ended", 3, ""), ("waiting", 5, ""), ("computing", 4, "")],
    [("waiting", 4, ""), ("waiting", 4, ""), ("computing", 4, "")],
    [("computing", 4, ""), ("waiting", 4, ""), ("waiting", 4, "T")],
    [("waiting", 4, ""), ("waiting", 4, ""), ("waiting", 3, "")],
    [("ended", 3, ""), ("ended", 3, ""), ("starting", 0, "")],
]
"""Activity, steps and state of the process of three ranks, the last of which is suspected."""


@pytest.mark.parametrize("signs", SUSPECTED)
def test_shortened_report_has_the_rank_for_which_the_others_wait(
    signs: list[tuple[str, int, str]], report_store: ReportStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pseudoreal_operator.observe.report_store.MOST_KEPT", 16)
    ranks = [
        RankReport(rank=rank, activity=word, seconds=0, step=step, process=process)
        for rank, (word, step, process) in enumerate(signs)
    ]
    report_store.store(REPORTER, PodReport(ranks=ranks), NOON)
    (last_report,) = report_store.of_job(JOB)
    assert [rank.rank for rank in last_report.report.ranks] == [2]
    assert last_report.steps == max(step for _, step, _ in signs)


def test_pod_with_a_shortened_report_makes_no_progress_without_steps(
    report_store: ReportStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pseudoreal_operator.observe.report_store.MOST_KEPT", 16)
    ranks = [RankReport(rank=rank, activity="waiting", seconds=0, step=step) for rank, step in enumerate((7, 6, 7))]
    for seconds in (0, 300, 600):
        report_store.store(REPORTER, PodReport(ranks=ranks), after(seconds))
    (last_report,) = report_store.of_job(JOB)
    assert (last_report.last, last_report.progressed) == (after(600), None)


def test_shortened_report_has_the_oldest_save(report_store: ReportStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pseudoreal_operator.observe.report_store.MOST_KEPT", 16)
    ranks = [
        RankReport(rank=rank, activity="waiting", seconds=0, step=1, saving_seconds=saving)
        for rank, saving in enumerate((None, 50, 70))
    ]
    report_store.store(REPORTER, PodReport(ranks=ranks), NOON)
    (last_report,) = report_store.of_job(JOB)
    assert [rank.saving_seconds for rank in last_report.report.ranks] == [70]


@pytest.mark.usefixtures("few_are_kept")
@pytest.mark.parametrize("forget", ["job", "execution", "ranks"])
def test_forgotten_reports_make_room(forget: str, report_store: ReportStore) -> None:
    report = report_of_ranks(64)
    for number in range(3):
        execution = EXECUTION._replace(number=number)
        pods = [ReportingPod(JOB, execution, index, f"pod-{number}-{index}") for index in range(1000)]
        for pod in pods:
            report_store.store(pod, report, NOON)
        assert len(report_store.of_job(JOB)) == FULL + SHORT
        match forget:
            case "job":
                report_store.forget(JOB)
                report_store.follow(JOB, PODS)
            case "execution":
                report_store.forget_other_executions(JOB, set())
                assert report_store.of_job(JOB) == ()
            case "ranks":
                for pod in pods:
                    report_store.store(pod, PodReport(), NOON)
                assert len(report_store.of_job(JOB)) == 1000
                assert report_store._kept == {JOB[0]: 1000}
                report_store.forget_other_executions(JOB, set())
        assert not report_store._kept


def test_pod_that_takes_a_place_frees_what_its_predecessor_kept(report_store: ReportStore) -> None:
    for number in range(1000):
        assert report_store.store(replace(REPORTER, pod=f"pod-{number}"), report_of_ranks(64), NOON)
    (last_report,) = report_store.of_job(JOB)
    assert last_report.pod == "pod-999"
    assert [*report_store._jobs[JOB].places] == ["pod-999"]


def test_log_counts_if_it_is_ahead_of_the_reports(report_store: ReportStore) -> None:
    report_store.read_log(REPORTER, progress(3), NOON)
    report_store.read_log(REPORTER, progress(3), after(9))
    (last_report,) = report_store.of_job(JOB)
    assert (last_report.training_since, last_report.last, last_report.report.progress) == (NOON, NOON, progress(3))
    report_store.store(REPORTER, report_at(7), after(10))
    report_store.read_log(REPORTER, progress(6), after(20))
    assert report_store.of_job(JOB)[0].last == after(10)
    report_store.read_log(REPORTER, progress(8), after(30))
    (last_report,) = report_store.of_job(JOB)
    assert (last_report.progressed, last_report.report.progress) == (after(30), progress(8))


def test_finish_request_is_for_one_phase_and_ends_when_served(report_store: ReportStore) -> None:
    real = replace(REPORTER, execution=Execution("real", StageKind.TRAIN, 1))
    assert not report_store.answer(REPORTER, NOON).finish_phase
    report_store.follow(JOB, PODS, frozenset({"pseudo"}))
    assert report_store.answer(REPORTER, NOON).finish_phase
    assert not report_store.answer(real, NOON).finish_phase
    report_store.follow(JOB, PODS)
    assert not report_store.answer(REPORTER, NOON).finish_phase


def store_with_rank_zero_pod(at: datetime = NOON) -> ReportStore:
    report_store = ReportStore()
    report_store.follow(JOB, PODS)
    report_store.set_rank_zero_pod(JOB, REPORTER, at)
    return report_store


def log_readings(report_store: ReportStore, seconds: range) -> list[int]:
    """Return the seconds at which the log of the pod is read, if the log has nothing to say."""
    return [second for second in seconds if report_store.most_silent(after(second)) == REPORTER]


def test_log_of_a_silent_pod_is_read_less_and_less_often() -> None:
    assert log_readings(store_with_rank_zero_pod(), range(0, 2000)) == [21, 81, 162, 324, 648, 1296]


def test_log_of_a_reporting_pod_is_not_read() -> None:
    report_store = store_with_rank_zero_pod()
    for second in range(0, 600, 10):
        report_store.store(REPORTER, report_at(1), after(second))
        assert log_readings(report_store, range(second, second + 10)) == []
    assert log_readings(report_store, range(600, 800)) == [611, 671, 752], "until it falls silent"


@pytest.mark.parametrize(
    "witness",
    [replace(REPORTER, index=1), replace(REPORTER, index=1, execution=EXECUTION._replace(number=0))],
    ids=["spare pod", "dying pod of an earlier execution"],
)
def test_log_is_read_while_only_pods_report_that_cannot_tell_of_a_hang(witness: ReportingPod) -> None:
    report_store = store_with_rank_zero_pod()
    report = PodReport() if witness.execution == EXECUTION else report_at(7)
    read = []
    for second in range(0, 100, 5):
        report_store.store(witness, report, after(second))
        read += log_readings(report_store, range(second, second + 5))
    assert read == [21, 81]


def test_log_of_a_pod_that_reports_now_and_then_is_read_every_minute() -> None:
    """Each reading is a request: reports at intervals just above QUIET_SECONDS must not make readings more frequent."""
    report_store, found = store_with_rank_zero_pod(), list[int]()
    for second in range(300):
        if second % 22 == 0:
            report_store.store(REPORTER, report_at(1), after(second))
        found += log_readings(report_store, range(second, second + 1))
    assert len(found) >= 3
    assert all(later - earlier >= 60 for earlier, later in pairwise(found))


def test_log_with_new_steps_is_read_every_minute() -> None:
    report_store, found = store_with_rank_zero_pod(), []
    for second in range(300):
        if report_store.most_silent(after(second)):
            found.append(second)
            report_store.read_log(REPORTER, progress(second), after(second + 0.02))
    assert found == [21, 82, 143, 204, 265]


def test_silence_is_measured_per_execution_while_its_pod_runs() -> None:
    report_store = store_with_rank_zero_pod()
    report_store.set_rank_zero_pod(JOB, None, after(1))
    assert log_readings(report_store, range(100)) == []
    report_store.set_rank_zero_pod(JOB, REPORTER, after(100))
    report_store.set_rank_zero_pod(JOB, REPORTER, after(115))
    assert log_readings(report_store, range(100, 130)) == [121], "since it runs"
    stranger = ("elsewhere", JOB[1])
    report_store.set_rank_zero_pod(stranger, replace(REPORTER, job=stranger), NOON)
    assert log_readings(report_store, range(500, 501)) == [500], "of the job that is followed"
    report_store.forget(JOB)
    assert report_store.most_silent(after(900)) is None


def test_longest_unread_log_is_read_first() -> None:
    report_store = ReportStore()
    for number in range(3):
        job = ("default", str(number))
        report_store.follow(job, PODS)
        report_store.set_rank_zero_pod(job, ReportingPod(job, EXECUTION, 0, f"pod-{number}"), after(-number))
    read = [report_store.most_silent(after(100 + second)) for second in range(4)]
    assert [silent.pod if silent else None for silent in read] == ["pod-2", "pod-1", "pod-0", None]


def test_progress_requeues_are_rate_limited_over_all_jobs() -> None:
    report_store, woken = ReportStore(), list[float]()
    for number in range(1000):
        report_store.follow(("default", str(number)), PODS, frozenset(), woken.append)
    for step in range(3):
        report_store.store(
            replace(REPORTER, job=("default", "7")), report_at(step, "computing" if step else "starting"), NOON
        )
    assert woken == [SOON_SECONDS, SOON_SECONDS, 1000 / REQUEUES_PER_SECOND], "what begins is told at once"
    woken.clear()
    report_store.store(replace(REPORTER, job=("default", "8")), report_at(5), NOON)
    assert woken == [1000 / REQUEUES_PER_SECOND], "it trained before, and was not heard"


@pytest.mark.parametrize(
    ("reports", "wakes"),
    [
        ([report_at(0, "starting")], [SOON_SECONDS]),
        ([report_at(0, "starting"), report_at(0, "starting")], [SOON_SECONDS]),
        ([report_at(0, "starting"), report_at(0), report_at(0)], [SOON_SECONDS] * 2),
        ([report_at(1), report_at(2), report_at(2)], [SOON_SECONDS, PROGRESS_SECONDS]),
        ([report_at(1), report_at(1, checkpoint=SAVED), report_at(1)], [SOON_SECONDS, PROGRESS_SECONDS]),
        ([report_at(1), report_at(1, "ended"), report_at(1, "ended")], [SOON_SECONDS] * 2),
    ],
)
def test_job_is_requeued_for_changes_in_reports(reports: list[PodReport], wakes: list[float]) -> None:
    report_store, woken = ReportStore(), list[float]()
    report_store.follow(JOB, PODS, frozenset(), woken.append)
    for report in reports:
        report_store.store(REPORTER, report, NOON)
    assert woken == wakes

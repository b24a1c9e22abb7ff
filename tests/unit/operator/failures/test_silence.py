"""Silence is no hang: training does not depend on reports, and without witnesses no pod is blamed."""

from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from typing import Any

import pytest
from pseudoreal_api.wire.reports import PodReport, RankReport
from pseudoreal_operator.failures.hang import find_stall, seconds_to_stall
from pseudoreal_operator.lifecycle.plan import plan
from pseudoreal_operator.observe.report_store import QUIET_SECONDS, UNHEARD_SECONDS, ReportingPod, ReportStore
from pseudoreal_operator.observe.stages import Execution, StageKind
from pseudoreal_operator.observe.view import Observed, View
from pseudoreal_operator.status.conditions import find

from tests.unit.operator.lifecycle.support.steps import begun
from tests.unit.operator.observe.support.reports import progress
from tests.unit.operator.support.world import SETTINGS

JOBS = 1200
EXECUTION = Execution("pseudo", StageKind.TRAIN, 1)


class Cluster:
    """Identical jobs, whose pods send reports. `world` stands for any of them."""

    def __init__(self, jobs: int = 1, namespaces: int = 1, **changes: Any) -> None:
        self.world = begun(**changes)
        self.report_store = ReportStore()
        self.woken = [0] * jobs
        self.keys = [(f"team-{number % namespaces}", str(number)) for number in range(jobs)]
        self.pods = [pod.name for pod in self.world.observe().pods]
        for number, key in enumerate(self.keys):
            self.report_store.follow(key, frozenset(), partial(self._wake, number))
            self.report_store.listen(key, self.reporter(number), self.now)

    def _wake(self, job: int, _: float) -> None:
        self.woken[job] += 1

    @property
    def now(self) -> datetime:
        return self.world.now

    def reporter(self, job: int, index: int = 0) -> ReportingPod:
        return ReportingPod(self.keys[job], EXECUTION, index, self.pods[index])

    def report(self, step: int, jobs: range | None = None, index: int = 0, activity: str = "computing") -> None:
        sign = RankReport(rank=index, activity=activity, seconds=0, step=step)
        for job in range(len(self.keys)) if jobs is None else jobs:
            self.report_store.store(self.reporter(job, index), PodReport(ranks=[sign]), self.now)

    def tick(self, seconds: float) -> None:
        self.world.tick(seconds)
        self.report_store.notice_silence(self.now)

    def see(self, job: int = 0) -> Observed:
        key = self.keys[job]
        return replace(
            self.world.observe(),
            last_reports=self.report_store.of_job(key, {EXECUTION}),
            silent_since=self.report_store.silent_since(key, self.now),
            has_reported=self.report_store.has_reported(key),
            path_is_cut=self.report_store.path_is_cut,
        )

    def stall(self, job: int = 0) -> str:
        found = find_stall(View(self.see(job), self.now))
        return found.reason if found else ""

    def says(self, job: int = 0) -> tuple[str, str]:
        status = plan(self.see(job), self.now, SETTINGS).status
        progressing = find(status, "Progressing")
        assert progressing
        return progressing.reason, progressing.message

    def read_log(self, step: int, seconds: float = 0.0) -> None:
        line = progress(step).model_copy(update={"seconds": float(step)})
        self.report_store.read_log(self.reporter(0), line, self.now + timedelta(seconds=seconds))


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


def two_pods(**changes: Any) -> Cluster:
    return Cluster(spec__phases__0__workers=2, **changes)


def test_a_path_that_is_cut_for_an_hour_restarts_nobody() -> None:
    """No logs are read. When the path is cut, the jobs' hang clocks are at many different points."""
    cluster = Cluster(JOBS)
    for job in range(JOBS):
        cluster.report(4, range(job, job + 1))
    cluster.world.tick(1)
    cluster.report(5)
    for _ in range(60):
        cluster.tick(60)
        assert {cluster.stall(job) for job in range(0, JOBS, 7)} == {""}
    assert {cluster.stall(job) for job in range(JOBS)} == {""}
    for job in range(0, JOBS, 100):
        status = plan(cluster.see(job), cluster.now, SETTINGS).status
        assert (status.execution, status.restarts) == (1, 0)
    assert cluster.report_store.path_is_cut


def test_one_job_of_which_nothing_is_heard_is_not_judged(cluster: Cluster) -> None:
    cluster.report(4)
    cluster.report(5)
    for _ in range(120):
        cluster.tick(60)
        assert cluster.stall() == ""
    assert not cluster.report_store.path_is_cut, "one job may be silent for reasons of its own"


def test_pods_that_never_begin_are_not_judged_by_silence(cluster: Cluster) -> None:
    cluster.report(0, activity="starting")
    cluster.tick(7200)
    assert cluster.stall() == ""


def test_a_save_is_not_judged_by_silence(cluster: Cluster) -> None:
    sign = RankReport(rank=0, activity="computing", seconds=0, step=5, saving_seconds=30)
    cluster.report(4)
    cluster.report_store.store(cluster.reporter(0), PodReport(ranks=[sign]), cluster.now)
    cluster.tick(7200)
    assert cluster.stall() == ""


def test_a_pod_that_hangs_and_reports_is_judged(cluster: Cluster) -> None:
    cluster.report(4)
    for _ in range(180):
        cluster.report(5)
        cluster.tick(5)
    cluster.report(5)
    assert cluster.stall() == ""
    cluster.tick(0.1)
    assert cluster.stall() == "StepStalled"


@pytest.mark.parametrize("limit", [6, 15, 900])
def test_a_step_that_may_have_ended_unheard_is_not_judged(limit: int) -> None:
    """The last report came a while before the clock ran out."""
    cluster = Cluster(spec__hang={"stepSeconds": limit})
    cluster.report(4)
    cluster.report(5)
    cluster.tick(max(0, limit - 5.5))
    cluster.report(5)
    cluster.tick(5.6)
    assert cluster.stall() == ""
    wait = seconds_to_stall(View(cluster.see(), cluster.now))
    assert wait == 5, "it is looked at again while the pod may report"
    cluster.report(5)
    assert cluster.stall() == "StepStalled"


def test_after_silence_the_clock_does_not_begin_anew(cluster: Cluster) -> None:
    cluster.report(4)
    cluster.report(5)
    cluster.tick(3600)
    assert cluster.stall() == ""
    cluster.woken[0] = 0
    cluster.report(5)
    assert (cluster.stall(), cluster.woken) == ("StepStalled", [1])


def test_after_silence_a_job_that_went_on_is_not_judged(cluster: Cluster) -> None:
    cluster.report(5)
    cluster.tick(3600)
    cluster.report(9)
    assert cluster.stall() == ""


def test_a_pod_that_falls_silent_while_the_other_speaks_is_the_suspect() -> None:
    cluster = two_pods()
    for index in (0, 1):
        cluster.report(4, index=index)
        cluster.report(5, index=index)
    for _ in range(181):
        cluster.tick(5)
        cluster.report(5, index=0, activity="waiting")
    found = find_stall(View(cluster.see(), cluster.now))
    assert found
    assert found.culprit
    assert (found.reason, found.culprit.index) == ("StepStalled", 1)


def test_where_most_jobs_are_silent_a_pod_that_is_silent_too_is_not_blamed() -> None:
    cluster = Cluster(3, spec__phases__0__workers=2)
    for index in (0, 1):
        cluster.report(4, index=index)
        cluster.report(5, index=index)
    for _ in range(181):
        cluster.tick(5)
        cluster.report(5, range(1), index=0, activity="waiting")
    assert (cluster.report_store.path_is_cut, cluster.stall()) == (True, "")
    assert seconds_to_stall(View(cluster.see(), cluster.now)) == UNHEARD_SECONDS
    cluster.report(5, range(1), index=1)
    assert cluster.stall() == "StepStalled", "all of its pods are heard"


def test_nobody_cuts_the_path_with_jobs_of_one_namespace() -> None:
    """However many jobs the namespace has."""
    cluster = Cluster(20, namespaces=2)
    for job in range(16, 20, 2):
        cluster.report_store.forget(cluster.keys[job])
    for job in range(1, 15, 2):
        cluster.report_store.forget(cluster.keys[job])
    cluster.report(5)
    cluster.tick(QUIET_SECONDS + 1)
    jobs = cluster.report_store.silent_jobs(cluster.now)
    assert (jobs["team-0", True], jobs["team-1", True], cluster.report_store.path_is_cut) == (8, 3, True)
    cluster.report(6, range(15, 20))
    cluster.tick(0)
    assert not cluster.report_store.path_is_cut, "most jobs are silent, and all of one namespace"


def test_jobs_that_were_never_heard_do_not_count_for_the_path() -> None:
    cluster = Cluster(10)
    cluster.tick(3600)
    assert (cluster.report_store.path_is_cut, cluster.report_store.silent_jobs(cluster.now).total()) == (False, 0)


def test_a_log_that_stands_still_tells_of_a_hang(cluster: Cluster) -> None:
    """As long as each reading of the log shows something newer, there is no hang, however rare the readings are."""
    cluster.report(4)
    cluster.report(5)
    for step in (80, 160, 240):
        cluster.tick(1200)
        cluster.read_log(step)
        assert cluster.stall() == ""
    cluster.tick(890)
    cluster.read_log(240)
    assert cluster.stall() == ""
    cluster.tick(600)
    assert cluster.stall() == "", "nobody has looked since"
    cluster.woken[0] = 0
    cluster.read_log(240)
    assert (cluster.stall(), cluster.woken) == ("StepStalled", [1])


def test_steps_that_are_made_anew_are_steps_of_a_log_too(cluster: Cluster) -> None:
    """The ranks were restarted in place from an older checkpoint, without a report."""
    cluster.report(400)
    for step in (390, 200, 250, 300):
        cluster.tick(880)
        cluster.read_log(step)
        assert cluster.stall() == ""


def test_a_log_tells_nothing_where_it_was_read_once(cluster: Cluster) -> None:
    cluster.report(4)
    cluster.report(5)
    cluster.tick(3600)
    cluster.read_log(5)
    assert cluster.stall() == ""


def test_a_job_says_that_it_is_not_heard(cluster: Cluster) -> None:
    cluster.report(5)
    cluster.report(6)
    cluster.tick(UNHEARD_SECONDS - 1)
    assert cluster.says()[0] == "Training"
    cluster.woken[0] = 0
    cluster.tick(2)
    cluster.tick(2)
    assert cluster.woken == [1], "once"
    reason, message = cluster.says()
    assert reason == "Unheard"
    assert f"none of its pods was heard since {cluster.now - timedelta(seconds=63):%Y-%m-%d %H:%M:%S} UTC" in message
    assert "no hang is judged by it" in message
    cluster.report(6)
    assert (cluster.says()[0], cluster.woken) == ("Training", [2])


def test_a_path_that_is_cut_is_told() -> None:
    cluster = Cluster(2)
    cluster.report(5)
    cluster.tick(UNHEARD_SECONDS + 1)
    assert "most jobs are silent, so it is the path" in cluster.says()[1]


@pytest.mark.parametrize(
    ("changes", "lacks"),
    [
        ({"spec__phases__0__workers": 2, "spec__phases__0__spares": 1}, "no spare pod can take a place"),
        ({"spec__phases__0__workers": 2}, "notices nothing of a restart in place"),
        ({"spec__requests": [{"id": "1", "type": "FinishPhase", "phase": "pseudo"}]}, "does not reach them"),
    ],
)
def test_what_needs_reports_says_so_where_none_was_ever_heard(changes: dict[str, Any], lacks: str) -> None:
    cluster = Cluster(**changes, spec__network={"hostNetwork": True})
    assert cluster.says()[0] == "Training"
    cluster.tick(UNHEARD_SECONDS + 1)
    reason, message = cluster.says()
    assert reason == "Unheard"
    assert lacks in message
    assert "none of its pods was heard so far" in message
    assert "networkPolicy.from" in message


def test_a_job_that_needs_no_reports_says_nothing_of_them(cluster: Cluster) -> None:
    cluster.tick(3600)
    assert cluster.says()[0] == "Training"


def test_the_pods_of_a_phase_that_is_to_end_are_told_once() -> None:
    cluster = Cluster(spec__requests=[{"id": "1", "type": "FinishPhase", "phase": "pseudo"}])
    cluster.report_store.follow(cluster.keys[0], frozenset({"pseudo"}), partial(cluster._wake, 0))
    cluster.report(5)
    assert "told to end now as they report next" in cluster.says()[1]
    cluster.woken[0] = 0
    for _ in range(3):
        assert cluster.report_store.answer(cluster.reporter(0), cluster.now).finish_phase
    assert (cluster.says()[0], cluster.woken) == ("Finishing", [1])
    cluster.tick(5)
    cluster.report(6)
    assert cluster.says()[0] == "Finishing", "it stays told"

"""Silence is no hang: training does not depend on reports, and without witnesses no pod is blamed."""

from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from typing import Any

import pytest
from pseudoreal_api.wire.reports import PodReport, RankReport
from pseudoreal_operator.failures.hang import find_hang, seconds_to_hang
from pseudoreal_operator.lifecycle.plan import plan
from pseudoreal_operator.observe.report_store import QUIET_SECONDS, UNHEARD_SECONDS, ReportingPod, ReportStore
from pseudoreal_operator.observe.stages import Execution, StageKind
from pseudoreal_operator.observe.view import Observed, View
from pseudoreal_operator.status.conditions import find

from tests.unit.operator.lifecycle.support.steps import start_job
from tests.unit.operator.observe.support.reports import PODS, progress
from tests.unit.operator.support.world import SETTINGS

JOBS = 1200
EXECUTION = Execution("pseudo", StageKind.TRAIN, 1)


class Cluster:
    """Identical jobs, whose pods send reports. `world` stands for any of them."""

    def __init__(self, jobs: int = 1, namespaces: int = 1, **changes: Any) -> None:
        self.world = start_job(**changes)
        self.report_store = ReportStore()
        self.woken = [0] * jobs
        self.keys = [(f"team-{number % namespaces}", str(number)) for number in range(jobs)]
        self.pods = [pod.name for pod in self.world.observe().pods]
        for number, key in enumerate(self.keys):
            self.report_store.follow(key, PODS, frozenset(), partial(self._wake, number))
            self.report_store.set_rank_zero_pod(key, self.reporter(number), self.now)

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
            last_reports=self.report_store.of_job(key),
            silent_since=self.report_store.silent_since(key, self.now),
            has_reported=self.report_store.has_reported(key),
            path_is_cut=self.report_store.path_is_cut,
        )

    def stall(self, job: int = 0) -> str:
        found = find_hang(View(self.see(job), self.now))
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


def test_cut_network_path_restarts_no_job() -> None:
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


def test_silent_job_does_not_hang(cluster: Cluster) -> None:
    cluster.report(4)
    cluster.report(5)
    for _ in range(120):
        cluster.tick(60)
        assert cluster.stall() == ""
    assert not cluster.report_store.path_is_cut, "one job may be silent for reasons of its own"


def test_silent_start_does_not_hang(cluster: Cluster) -> None:
    cluster.report(0, activity="starting")
    cluster.tick(7200)
    assert cluster.stall() == ""


def test_silent_save_does_not_hang(cluster: Cluster) -> None:
    sign = RankReport(rank=0, activity="computing", seconds=0, step=5, saving_seconds=30)
    cluster.report(4)
    cluster.report_store.store(cluster.reporter(0), PodReport(ranks=[sign]), cluster.now)
    cluster.tick(7200)
    assert cluster.stall() == ""


def test_hung_pod_that_reports_is_found(cluster: Cluster) -> None:
    cluster.report(4)
    for _ in range(180):
        cluster.report(5)
        cluster.tick(5)
    cluster.report(5)
    assert cluster.stall() == ""
    cluster.tick(0.1)
    assert cluster.stall() == "StepStalled"


@pytest.mark.parametrize("limit", [6, 15, 900])
def test_step_that_may_have_ended_in_silence_does_not_hang(limit: int) -> None:
    """The last report came a while before the clock ran out."""
    cluster = Cluster(spec__hang={"stepSeconds": limit})
    cluster.report(4)
    cluster.report(5)
    cluster.tick(max(0, limit - 5.5))
    cluster.report(5)
    cluster.tick(5.6)
    assert cluster.stall() == ""
    wait = seconds_to_hang(View(cluster.see(), cluster.now))
    assert wait == 5, "it is looked at again while the pod may report"
    cluster.report(5)
    assert cluster.stall() == "StepStalled"


def test_step_clock_includes_silence(cluster: Cluster) -> None:
    cluster.report(4)
    cluster.report(5)
    cluster.tick(3600)
    assert cluster.stall() == ""
    cluster.woken[0] = 0
    cluster.report(5)
    assert (cluster.stall(), cluster.woken) == ("StepStalled", [1])


def test_job_that_progressed_in_silence_does_not_hang(cluster: Cluster) -> None:
    cluster.report(5)
    cluster.tick(3600)
    cluster.report(9)
    assert cluster.stall() == ""


def test_silent_pod_is_suspected_while_others_report() -> None:
    cluster = two_pods()
    for index in (0, 1):
        cluster.report(4, index=index)
        cluster.report(5, index=index)
    for _ in range(181):
        cluster.tick(5)
        cluster.report(5, index=0, activity="waiting")
    found = find_hang(View(cluster.see(), cluster.now))
    assert found
    assert found.culprit
    assert (found.reason, found.culprit.index) == ("StepStalled", 1)


def test_hang_of_all_workers_is_found_in_the_log_while_an_idle_spare_pod_reports(cluster: Cluster) -> None:
    spare = replace(cluster.reporter(0), index=1, pod="spare")
    cluster.report(4)
    cluster.report(5)
    for _ in range(400):
        cluster.tick(5)
        cluster.report_store.store(spare, PodReport(), cluster.now)
        if cluster.report_store.most_silent(cluster.now):
            cluster.read_log(5)
    assert cluster.stall() == "StepStalled"


def test_silent_pod_is_not_suspected_while_most_jobs_are_silent() -> None:
    cluster = Cluster(3, spec__phases__0__workers=2)
    for index in (0, 1):
        cluster.report(4, index=index)
        cluster.report(5, index=index)
    for _ in range(181):
        cluster.tick(5)
        cluster.report(5, range(1), index=0, activity="waiting")
    assert (cluster.report_store.path_is_cut, cluster.stall()) == (True, "")
    assert seconds_to_hang(View(cluster.see(), cluster.now)) == UNHEARD_SECONDS
    cluster.report(5, range(1), index=1)
    assert cluster.stall() == "StepStalled", "all of its pods are heard"


def test_jobs_of_one_namespace_cannot_fake_a_cut_path() -> None:
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


def test_jobs_that_never_reported_do_not_count_for_a_cut_path() -> None:
    cluster = Cluster(10)
    cluster.tick(3600)
    assert (cluster.report_store.path_is_cut, cluster.report_store.silent_jobs(cluster.now).total()) == (False, 0)


def test_unchanged_log_is_a_witness_of_a_hang(cluster: Cluster) -> None:
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


def test_repeated_steps_in_a_log_are_progress(cluster: Cluster) -> None:
    """The ranks were restarted in place from an older checkpoint, without a report."""
    cluster.report(400)
    for step in (390, 200, 250, 300):
        cluster.tick(880)
        cluster.read_log(step)
        assert cluster.stall() == ""


def test_log_that_was_read_once_is_no_witness(cluster: Cluster) -> None:
    cluster.report(4)
    cluster.report(5)
    cluster.tick(3600)
    cluster.read_log(5)
    assert cluster.stall() == ""


def test_condition_says_that_no_report_arrives(cluster: Cluster) -> None:
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
    assert (
        f"no report of its pods has arrived since {cluster.now - timedelta(seconds=63):%Y-%m-%d %H:%M:%S} UTC"
        in message
    )
    assert "This counts neither as a fault nor as a hang" in message
    cluster.report(6)
    assert (cluster.says()[0], cluster.woken) == ("Training", [2])


def test_condition_mentions_a_cut_path() -> None:
    cluster = Cluster(2)
    cluster.report(5)
    cluster.tick(UNHEARD_SECONDS + 1)
    assert "most jobs are silent, so the cause is probably the network" in cluster.says()[1]


@pytest.mark.parametrize(
    ("changes", "lacks"),
    [
        ({"spec__phases__0__workers": 2, "spec__phases__0__spares": 1}, "no spare pod can replace a worker"),
        ({"spec__phases__0__workers": 2}, "does not notice a restart in place"),
        ({"spec__requests": [{"id": "1", "type": "FinishPhase", "phase": "pseudo"}]}, "does not reach the pods"),
    ],
)
def test_condition_names_features_that_need_reports(changes: dict[str, Any], lacks: str) -> None:
    cluster = Cluster(**changes, spec__network={"hostNetwork": True})
    assert cluster.says()[0] == "Training"
    cluster.tick(UNHEARD_SECONDS + 1)
    reason, message = cluster.says()
    assert reason == "Unheard"
    assert lacks in message
    assert "no report of its pods has arrived so far" in message
    assert "networkPolicy.from" in message


def test_condition_is_silent_about_reports_that_no_feature_needs(cluster: Cluster) -> None:
    cluster.tick(3600)
    assert cluster.says()[0] == "Training"


def test_finish_request_reaches_pods_and_gives_one_event() -> None:
    cluster = Cluster(spec__requests=[{"id": "1", "type": "FinishPhase", "phase": "pseudo"}])
    cluster.report_store.follow(cluster.keys[0], PODS, frozenset({"pseudo"}), partial(cluster._wake, 0))
    cluster.report(5)
    assert "told to end now when they report next" in cluster.says()[1]
    cluster.woken[0] = 0
    for _ in range(3):
        assert cluster.report_store.answer(cluster.reporter(0), cluster.now).finish_phase
    assert (cluster.says()[0], cluster.woken) == ("Finishing", [1])
    cluster.tick(5)
    cluster.report(6)
    assert cluster.says()[0] == "Finishing", "it stays told"

"""Requests of the passes over one job, with the memory of watches: few, none while nothing changes, and a live reading
before all that cannot be undone."""

import asyncio
import copy
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import pytest
from kubernetes.aio.client import ApiException
from pseudoreal_api.spec.job import PseudoRealJob
from pseudoreal_api.status.status import PseudoRealJobStatus
from pseudoreal_api.wire.reports import PodReport, RankReport
from pseudoreal_operator.cluster.api import Api, Json, Name
from pseudoreal_operator.lifecycle.plan import plan
from pseudoreal_operator.loop.event_recorder import EventRecorder
from pseudoreal_operator.loop.loop import PAUSE_SECONDS, read_logs
from pseudoreal_operator.loop.reconcile import Callbacks, Dependencies, reconcile
from pseudoreal_operator.metrics.registry import OperatorCounters
from pseudoreal_operator.observe.memory import KINDS
from pseudoreal_operator.observe.reading import read_pod
from pseudoreal_operator.observe.report_store import ReportingPod, ReportStore
from pseudoreal_operator.status.conditions import has_ended

from tests.unit.operator.lifecycle.test_cost import body, phases
from tests.unit.operator.support.watched import Watches
from tests.unit.operator.support.world import SETTINGS, UID, World

NAME = Name("default", "a")
PAGE = 10
"""Number of objects on a page of a list."""


class Cluster:
    """A fake API server with the objects of a world; it counts requests by their verb and kind."""

    def __init__(self, workers: int) -> None:
        job = body(phases=phases(1, workers=workers, batch={"sequences": 16 * workers}))
        self.world = World(PseudoRealJob.from_object(job), now=datetime.now(UTC))
        self.watches = Watches(self.world)
        self.requests: list[str] = []
        self.version = 0
        self.during_lists: Callable[[], object] = lambda: None
        """Called after a list of pods is made, and before the operator has it."""
        self.loses_answers = False
        """Whether requests to create a Job get no answer, although it is created."""
        api, self.report_store = cast(Api, self), ReportStore()
        self.deps = Dependencies(
            api,
            SETTINGS,
            self.report_store,
            OperatorCounters(),
            EventRecorder(api, OperatorCounters()),
            memory=self.watches.memory,
        )
        self.deps.memory.keep_job(self.job())
        self.deps.memory.jobs_missed()
        self.deps.memory.jobs_listed(None)
        self.watches.happen()

    def job(self) -> Json:
        metadata = {"name": "a", "namespace": "default", "uid": UID, "generation": 1}
        return {
            "apiVersion": "pseudoreal.dev/v1alpha1",
            "kind": "PseudoRealJob",
            "metadata": metadata | {"resourceVersion": str(10**9 + self.version)},
            "spec": self.world.job.spec.to_dict(),
            "status": self.world.status.to_dict(),
        }

    # Requests.

    async def find_within(self, _most: int, *asked: str) -> Json | None:
        return await self.find(*asked)

    async def find(self, kind: str, *_: str) -> Json | None:
        self.requests.append(f"GET {kind}")
        return self.job() if kind == "PseudoRealJob" else None

    async def each(self, kind: str, *_: str, listed: Callable[[str], object], **_also: Any) -> AsyncIterator[Json]:
        self.watches.happen()
        objects = self.watches._present(kind)
        listed(str(self.watches._version))
        self.requests += [f"LIST {kind}"] * max(1, -(-len(objects) // PAGE))
        for each in objects.values():
            yield each
        if kind == "Pod":
            self.during_lists()

    async def create(self, manifest: Json, *, dry_run: bool = False) -> Json:
        self.requests.append(f"CREATE {manifest['kind']}")
        if not dry_run:
            self.world._apply(manifest)
            if self.loses_answers and manifest["kind"] == "Job":
                raise TimeoutError
        self.watches.happen()
        return manifest | {"metadata": manifest["metadata"] | {"resourceVersion": str(self.watches._version)}}

    async def apply(self, manifest: Json, _subresource: str, **_: Any) -> Json:
        self.requests.append("STATUS")
        if manifest["metadata"]["resourceVersion"] != str(10**9 + self.version):
            raise ApiException(status=409)
        self.world._write(PseudoRealJobStatus.model_validate(manifest["status"]))
        self.version += 1
        return self.job()

    async def merge(self, kind: str, _namespace: str, name: str, _patch: Json) -> Json:
        self.requests.append(f"PATCH {kind}")
        self.world._fail_job(name)
        return {"metadata": {"resourceVersion": str(self.watches._version)}}

    async def delete(self, kind: str, _namespace: str, name: str, **_: Any) -> None:
        self.requests.append(f"DELETE {kind}")
        self.world._stop(name) if kind == "Pod" else self.world._delete_job(name)

    async def log_tail(self, *_: object) -> str:
        self.requests.append("LOG")
        return ""

    # Steps.

    async def reconcile(self, told: bool = True) -> float | None:
        if told:
            self.watches.tell_all()
        return await reconcile(self.deps, NAME, Callbacks(lambda _after: None, lambda _body: None))

    async def start(self, steps: int = 5) -> None:
        """Create the Job, and start its pods in a number of steps, with a pass after each of them."""
        await self.reconcile()
        self.world.control()
        pods = self.world.waiting()
        for pod in pods:
            pod["spec"]["nodeName"] = f"node-{pod['metadata']['name']}"
        await self.reconcile()
        for step in range(steps):
            for pod in pods[step * len(pods) // steps : (step + 1) * len(pods) // steps]:
                pod["status"] = {
                    "phase": "Running",
                    "conditions": [{"type": "Ready", "status": "True"}],
                    "containerStatuses": [{"name": "trainer", "state": {"running": {}}}],
                }
            await self.reconcile()

    def report(self, step: int) -> None:
        for pod in map(read_pod, self.world.pods.values()):
            rank = RankReport(rank=pod.index, activity="computing", seconds=0, step=step)
            reporter = ReportingPod(("default", UID), pod.execution, pod.index, pod.name)
            self.report_store.store(reporter, PodReport(ranks=[rank]), datetime.now(UTC))

    async def finish(self) -> None:
        self.world.finish_all()
        while not has_ended(self.world.status):
            self.world.control()
            await self.reconcile()

    def reads(self) -> list[str]:
        """Return the requests since the last call that are no writes."""
        found = [request for request in self.requests if request.split()[0] in ("GET", "LIST", "LOG")]
        self.requests.clear()
        return found


async def requests_until_done(workers: int) -> list[str]:
    cluster = Cluster(workers)
    await cluster.start()
    cluster.report(1)
    await cluster.reconcile()
    await cluster.finish()
    assert has_ended(cluster.world.status), cluster.world.status
    return cluster.requests


async def test_requests_of_a_job_do_not_grow_with_its_pods() -> None:
    few, many = await requests_until_done(5), await requests_until_done(5 * PAGE)
    assert few == many
    assert sum(request.startswith(("GET", "LIST")) for request in few) <= 8


async def test_pods_from_memory_count_a_tenth_of_listed_pods() -> None:
    cluster, counts = Cluster(50), list[int]()
    await cluster.start()
    cluster.report(1)
    for _ in range(2):
        await cluster.reconcile()
    cluster.reads()
    for told in (True, False):
        if not told:
            cluster.deps.memory.distrust(NAME)
        await reconcile(cluster.deps, NAME, Callbacks(lambda _: None, lambda _: None, counts.append))
        assert bool(cluster.reads()) is not told
    assert counts == [5, 51]


async def test_nothing_is_asked_while_nothing_changes_and_pods_report(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(4)
    await cluster.start()
    cluster.report(1)
    await cluster.reconcile()
    await cluster.reconcile()
    cluster.requests.clear()
    for _ in range(20):
        cluster.report(1)
        await cluster.reconcile()
    monkeypatch.setattr("pseudoreal_operator.loop.loop.PAUSE_SECONDS", PAUSE_SECONDS / 1000)
    with suppress(TimeoutError):
        async with asyncio.timeout(0.2):
            await read_logs(cast(Api, cluster), cluster.report_store)
    assert cluster.requests == []


def test_no_log_is_read_while_another_pod_of_the_job_reports() -> None:
    store, now, job = ReportStore(), datetime.now(UTC), ("default", UID)
    execution = read_pod(_running_pod()).execution
    first, second = (ReportingPod(job, execution, index, f"pod-{index}") for index in (0, 1))
    store.follow(job, {"p0": 2})
    store.set_rank_zero_pod(job, first, now)
    for second_later in range(0, 100, 10):
        at = now + timedelta(seconds=second_later)
        store.store(second, PodReport(ranks=[RankReport(rank=1, activity="waiting", seconds=0, step=1)]), at)
        assert store.most_silent(at) is None
    assert store.most_silent(now + timedelta(seconds=200)) == first, "the path is off: no pod reports"


def _running_pod() -> Json:
    cluster = Cluster(1)
    cluster.world.settle()
    cluster.world.control()
    return next(iter(cluster.world.pods.values()))


# The memory is known to be behind.


async def test_created_job_is_awaited_before_the_memory_is_used() -> None:
    cluster = Cluster(2)
    await cluster.reconcile()
    assert not cluster.deps.memory.is_current("Job", NAME)
    cluster.reads()
    status = cluster.world.status
    await cluster.reconcile(told=False)
    assert "LIST Job" in cluster.reads(), "else the Job would count as deleted by someone else"
    assert (cluster.world.status.execution, cluster.world.status.restarts) == (1, 0)
    assert cluster.world.status.phases == status.phases
    cluster.watches.tell("Job")
    assert cluster.deps.memory.is_current("Job", NAME)
    await cluster.reconcile()
    assert cluster.reads() == []


async def test_created_job_is_awaited_although_the_answer_was_lost() -> None:
    cluster = Cluster(2)
    cluster.loses_answers = True
    with pytest.raises(TimeoutError):
        await cluster.reconcile()
    cluster.reads()
    for _ in range(2):
        await cluster.reconcile(told=False)
        assert "LIST Job" in cluster.reads()
    assert cluster.world.status.execution == 1
    await cluster.reconcile()
    assert cluster.reads() == []


@pytest.mark.parametrize("kind", KINDS)
async def test_memory_is_not_used_while_a_watch_is_cut_or_not_listed_again(kind: str) -> None:
    cluster = Cluster(2)
    await cluster.start()
    cluster.reads()
    cluster.watches.cut(kind)
    await cluster.reconcile(told=False)
    assert {"LIST Job", "LIST Pod"} <= set(cluster.reads())
    cluster.watches.memory.watch(kind, None).list_again()
    cluster.watches.resume(kind)
    await cluster.reconcile(told=False)
    assert {"LIST Job", "LIST Pod"} <= set(cluster.reads())
    cluster.watches.list_again(kind)
    await cluster.reconcile(told=False)
    assert cluster.reads() == []


async def test_result_told_after_the_end_of_its_job_counts_no_restart() -> None:
    """The reason for which passes once read everything (decision 0013)."""
    cluster = Cluster(2)
    await cluster.start()
    cluster.world.finish_all()
    cluster.world.control()
    cluster.watches.tell("Job")
    await cluster.reconcile(told=False)
    status = cluster.world.status
    assert (status.execution, status.restarts, status.phases[0].state) == (1, 0, "Complete")


@pytest.mark.parametrize("told", KINDS)
async def test_fault_is_counted_on_what_is_read_and_once(told: str) -> None:
    cluster = Cluster(2)
    await cluster.start()
    cluster.reads()
    first = cluster.world.alive()[0]
    cluster.world.finish(first, outcome="Failed")
    for _ in range(6):
        cluster.watches.tell(told)
        await cluster.reconcile(told=False)
        cluster.world.control()
    assert (cluster.world.status.execution, cluster.world.status.restarts) in ((1, 0), (2, 1))
    for _ in range(3):
        await cluster.reconcile()
        cluster.world.control()
    assert (cluster.world.status.execution, cluster.world.status.restarts) == (2, 1)
    assert "LIST Pod" in cluster.reads()


async def test_pods_of_a_doomed_execution_are_stopped_several_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, stopping, most = Cluster(100), 0, 0
    await cluster.start()
    cluster.world.finish(cluster.world.alive()[0], outcome="Failed")
    delete = cluster.delete

    async def take_a_while(*arguments: str, **options: Any) -> None:
        nonlocal stopping, most
        stopping += 1
        most = max(most, stopping)
        await asyncio.sleep(0)
        await delete(*arguments, **options)
        stopping -= 1

    monkeypatch.setattr(cluster, "delete", take_a_while)
    for _ in range(4):
        await cluster.reconcile()
    assert cluster.requests.count("DELETE Pod") == 99
    assert most == 16


async def test_an_api_server_that_deletes_no_pod_is_not_asked_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, asked = Cluster(100), list[str]()
    await cluster.start()
    cluster.world.finish(cluster.world.alive()[0], outcome="Failed")

    async def fail(_kind: str, _namespace: str, name: str, **_: Any) -> None:
        asked.append(name)
        await asyncio.sleep(0)
        raise TimeoutError

    monkeypatch.setattr(cluster, "delete", fail)
    errors = 0
    for _ in range(2):
        try:
            await cluster.reconcile()
        except TimeoutError:
            errors += 1
    assert errors > 0
    assert len(asked) <= 16 * errors


async def test_pod_that_is_told_while_a_pass_lists_is_not_taken_for_gone() -> None:
    cluster = Cluster(2)
    await cluster.start()
    first = next(iter(cluster.world.pods.values()))

    def replace_pod() -> None:
        successor = copy.deepcopy(first)
        cluster.world.vanish(first)
        successor["metadata"] |= {"name": "successor", "uid": "successor"}
        cluster.world.pods["successor"] = successor
        cluster.watches.tell_all()
        cluster.during_lists = lambda: None

    cluster.during_lists = replace_pod
    cluster.deps.memory.distrust(NAME)
    await cluster.reconcile()
    await cluster.reconcile()
    cluster.reads()
    await cluster.reconcile()
    assert cluster.reads() == []


async def test_newer_version_that_the_watch_of_jobs_tells_is_read() -> None:
    cluster = Cluster(2)
    await cluster.start()
    cluster.reads()
    cluster.version += 1
    cluster.deps.memory.job_changed("MODIFIED", cluster.job())
    await cluster.reconcile()
    assert "GET PseudoRealJob" in cluster.reads()
    await cluster.reconcile()
    assert cluster.reads() == []


async def test_conflict_of_a_status_from_memory_is_followed_by_a_reading() -> None:
    cluster = Cluster(2)
    await cluster.start()
    cluster.reads()
    cluster.version += 1
    cluster.world.pods[next(iter(cluster.world.pods))]["status"]["conditions"] = []
    with pytest.raises(ApiException):
        await cluster.reconcile()
    assert cluster.reads() == []
    await cluster.reconcile()
    assert {"GET PseudoRealJob", "LIST Job", "LIST Pod"} <= set(cluster.reads())
    assert cluster.world.status.replicas.ready == 1


async def test_error_of_a_plan_from_memory_is_followed_by_a_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, calls = Cluster(2), list[object]()
    await cluster.start()
    cluster.requests.clear()

    def fail_once(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 1:
            raise KeyError("Jobs and pods of different times")
        return plan(*arguments)

    monkeypatch.setattr("pseudoreal_operator.loop.reconcile.plan", fail_once)
    await cluster.reconcile()
    assert cluster.requests == ["GET PseudoRealJob", "LIST Job", "LIST Pod"], "and no error in the status"
    assert cluster.deps.counters.internal_errors == 0


async def test_distrust_that_comes_during_a_pass_stays() -> None:
    cluster = Cluster(2)
    await cluster.start()
    memory, apply = cluster.deps.memory, cluster.apply

    async def distrust_and_apply(*arguments: Any, **also: Any) -> Json:
        memory.distrust(NAME)
        return await apply(*arguments, **also)

    memory.distrust(NAME)
    cluster.world.pods[next(iter(cluster.world.pods))]["status"]["conditions"] = []
    cluster.apply = distrust_and_apply  # type: ignore[method-assign]
    cluster.requests.clear()
    await cluster.reconcile()
    assert "STATUS" in cluster.requests
    assert memory.job(NAME) is None
    await cluster.reconcile()
    assert memory.job(NAME) is not None


@pytest.mark.parametrize(
    "harm",
    [
        lambda memory: memory.jobs_missed(),
        lambda memory: memory.jobs_unwatched(),
        lambda memory: memory.distrust(NAME),
        lambda memory: setattr(memory, "_clock", lambda: 1e9),
    ],
    ids=["jobs missed", "jobs unwatched", "a failed pass", "long ago"],
)
async def test_everything_is_read_when_the_memory_of_jobs_may_be_wrong(harm: Callable[[Any], object]) -> None:
    cluster = Cluster(2)
    await cluster.start()
    cluster.reads()
    harm(cluster.deps.memory)
    await cluster.reconcile()
    assert {"GET PseudoRealJob", "LIST Job", "LIST Pod"} <= set(cluster.reads())

"""How jobs get into the queue when requests and objects are faulty."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import replace
from threading import Event
from typing import Any, cast

import pytest
from kubernetes.aio.client import ApiException
from prometheus_client import CollectorRegistry
from pseudoreal_api.names import LABEL_JOB
from pseudoreal_api.spec.job import PseudoRealJob
from pseudoreal_operator.cluster.api import Api, Json, Name
from pseudoreal_operator.cluster.bounds import Unreadable
from pseudoreal_operator.loop import loop as module
from pseudoreal_operator.loop.event_recorder import EventRecorder
from pseudoreal_operator.loop.job_metrics import JobMetrics
from pseudoreal_operator.loop.loop import RESYNC_SECONDS, Loop
from pseudoreal_operator.loop.planning_thread import SpecCache
from pseudoreal_operator.loop.reconcile import Callbacks, Dependencies, JobDeleted
from pseudoreal_operator.metrics.registry import OperatorCounters
from pseudoreal_operator.observe.report_store import ReportStore
from pseudoreal_operator.settings import Settings

from tests.support.jobs import good_job
from tests.unit.operator.cluster.support import virtual_time
from tests.unit.operator.observe.support.reports import PODS


class Server:
    """A fake API server that lists jobs, and calls `during` after each of them."""

    def __init__(self) -> None:
        self.jobs: list[Json] = []
        self.skipped: list[Json] = []
        self.during: Callable[[], object] = lambda: None

    async def each(
        self, _kind: str, _namespace: str | None, *, skipped: Callable[[Json, Unreadable], None]
    ) -> AsyncIterator[Json]:
        for body in self.jobs:
            yield body
            self.during()
        for body in self.skipped:
            skipped(body, Unreadable("TooDeep", "it is deep"))


def make_job(name: str, uid: str = "", version: int = 1) -> Json:
    return {"metadata": {"namespace": "n", "name": name, "uid": uid or name, "generation": version}, "spec": {}}


def make_loop(server: Server, *namespaces: str) -> Loop:
    api, counters = cast(Api, server), OperatorCounters()
    deps = Dependencies(
        api, Settings("trainer:1", "IfNotPresent", namespaces), ReportStore(), counters, EventRecorder(api, counters)
    )
    return Loop(deps, None, JobMetrics(CollectorRegistry()))


def record_passes(monkeypatch: pytest.MonkeyPatch) -> list[Name]:
    """Return a list to which the name of each job is added that gets a pass from now on."""
    names: list[Name] = []

    async def reconcile(_deps: Dependencies, name: Name, _callbacks: Callbacks) -> float | None:
        names.append(name)
        return None

    monkeypatch.setattr(module, "reconcile", reconcile)
    return names


async def _run_workers(loop: Loop) -> None:
    async with loop._queue.run_workers(2):
        await asyncio.sleep(1)


def test_listed_missing_and_unreadable_jobs_each_get_a_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server, names = Server(), record_passes(monkeypatch)

    async def main() -> None:
        loop = make_loop(server)
        loop.job_changed("ADDED", make_job("gone"))
        server.jobs, server.skipped = [make_job("a"), make_job("b")], [make_job("deep"), {"metadata": {}}]
        await loop._list_jobs_once()
        assert Name("n", "gone") not in loop._memory._jobs
        await _run_workers(loop)

    virtual_time.run(main())
    assert {name.name for name in names} == {"a", "b", "deep", "gone"}


def test_change_reported_during_a_list_wins_over_the_list() -> None:
    server = Server()

    async def main() -> None:
        loop = make_loop(server)
        server.jobs = [make_job("first"), make_job("second")]
        server.during = lambda: loop.job_changed("DELETED", make_job("second"))
        loop.job_changed("ADDED", make_job("second"))
        loop.job_changes_missed()
        await loop._list_jobs_once()
        assert loop._router.known_names() == {Name("n", "first")}

    virtual_time.run(main())


def test_namespace_without_permissions_does_not_keep_jobs_of_others_from_the_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    missing, listed = set[Name](), list[str | None]()

    class Forbidding(Server):
        async def each(self, _kind: str, _namespace: str | None, **_: Any) -> AsyncIterator[Json]:
            listed.append(_namespace)
            if _namespace == "forbidden":
                raise ApiException(status=403)
            yield make_job("a") | {"metadata": make_job("a")["metadata"] | {"namespace": _namespace}}

    async def main() -> None:
        loop = make_loop(Forbidding(), "forbidden", "n", "m")
        loop.job_changes_missed()
        loop._job_changes_missed.clear()
        loop.job_changed("ADDED", {"metadata": {"namespace": "forbidden", "name": "b", "uid": "b"}})
        monkeypatch.setattr(loop._router, "queue_missing", lambda found, known: missing.update(known - found))
        for _ in range(2):
            with pytest.raises(ApiException):
                await loop._list_jobs_once()
        assert [loop._memory.has_jobs_of(namespace) for namespace in ("forbidden", "n", "m")] == [False, True, True]

    virtual_time.run(main())
    assert listed == ["forbidden", "n", "m", "forbidden"]
    assert not missing, "a job that could not be listed is not missing"


@pytest.mark.parametrize("body", [{}, {"metadata": None}, make_job("a") | {"status": {"conditions": [3]}}])
def test_malformed_job_does_not_end_the_watch(body: Json, monkeypatch: pytest.MonkeyPatch) -> None:
    names = record_passes(monkeypatch)

    async def main() -> None:
        loop = make_loop(Server())
        loop.job_changed("MODIFIED", body)
        loop.job_changed("ADDED", make_job("good"))
        await _run_workers(loop)

    virtual_time.run(main())
    assert Name("n", "good") in names


def test_child_with_readable_metadata_only_requests_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    names = record_passes(monkeypatch)

    async def main() -> None:
        loop = make_loop(Server())
        loop.job_changed("ADDED", make_job("a"))
        async with loop._queue.run_workers(2):
            await asyncio.sleep(1)
            metadata = {"namespace": "n", "name": "p", "uid": "u", "labels": {LABEL_JOB: "a"}}
            for change in ("MODIFIED", "DELETED"):
                loop._child_changed("Pod", change, {"metadata": metadata})
                await asyncio.sleep(1)

    virtual_time.run(main())
    assert names == [Name("n", "a")] * 3


def test_missing_job_is_forgotten_and_its_successor_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        loop = make_loop(Server())

        async def reconcile(*_: Any) -> float | None:
            loop.job_changed("ADDED", make_job("a", uid="two"))
            for uid in ("a", "two"):
                loop._deps.report_store.follow(("n", uid), PODS)
            raise JobDeleted

        monkeypatch.setattr(module, "reconcile", reconcile)
        loop.job_changed("ADDED", make_job("a"))
        assert await loop._pass(Name("n", "a")) is None
        assert loop._router.uids_of(Name("n", "a")) == {"two"}
        store = loop._deps.report_store
        assert [key for key in (("n", "a"), ("n", "two")) if key in store._jobs] == [("n", "two")]

    virtual_time.run(main())


class ServerOfOne:
    """A fake API server with one job without children. `refusal`: answer to every status write; None: each is
    accepted."""

    def __init__(self, refusal: ApiException | None) -> None:
        metadata = {"namespace": "n", "uid": "one", "resourceVersion": "7", "generation": 1}
        self.body = good_job("a")
        self.body["metadata"] |= metadata
        self._refusal = refusal

    async def find_within(self, *_: Any) -> Json:
        return self.body

    async def find(self, *_: Any) -> None:
        return None

    async def each(self, *_: Any, listed: Callable[[str], object], **_others: Any) -> AsyncIterator[Json]:
        listed("7")
        for body in list[Json]():
            yield body

    async def create(self, manifest: Json, **_: Any) -> Json:
        return manifest

    async def apply(self, manifest: Json, *_: Any, **_others: Any) -> Json:
        if self._refusal is not None:
            raise self._refusal
        return self.body | {"metadata": self.body["metadata"] | {"resourceVersion": "8"}, "status": manifest["status"]}


class BlockedCache(SpecCache):
    """A cache of specs; its `parse` blocks until `may_parse` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.has_begun, self.may_parse = Event(), Event()

    def parse(self, body: Json) -> PseudoRealJob:
        self.has_begun.set()
        assert self.may_parse.wait(60)
        return super().parse(body)


@pytest.mark.parametrize("refusal", [None, ApiException(status=404)])
async def test_job_deleted_during_its_pass_is_forgotten(refusal: ApiException | None) -> None:
    """The pass went on to follow the job, and once nothing forgot it: its silence could count as a cut path."""
    server, cache = ServerOfOne(refusal), BlockedCache()
    loop = make_loop(cast(Server, server))
    loop._deps = deps = replace(loop._deps, spec_cache=cache)
    loop.job_changed("ADDED", server.body)
    running = asyncio.create_task(loop._pass(Name("n", "a")))
    await asyncio.to_thread(cache.has_begun.wait, 60)
    loop.job_changed("DELETED", server.body)
    cache.may_parse.set()
    with suppress(ApiException):
        await running
    kept: list[Any] = [deps.report_store._jobs, deps.sightings._jobs, loop._memory._jobs, loop._memory._families]
    assert not any(kept)


def test_unchanged_job_is_reconciled_within_ten_hours(monkeypatch: pytest.MonkeyPatch) -> None:
    names = record_passes(monkeypatch)

    async def main() -> None:
        loop = make_loop(Server())
        for number in range(20):
            loop.job_changed("ADDED", make_job(f"job-{number}"))
        async with loop._queue.run_workers(2):
            await asyncio.sleep(RESYNC_SECONDS * 0.7)
            assert len(names) == 20
            await asyncio.sleep(RESYNC_SECONDS * 0.2)
            assert 20 < len(names) < 40, "they do not come together"
            await asyncio.sleep(RESYNC_SECONDS * 0.2)

    virtual_time.run(main())
    assert len(names) == 40


def test_job_with_many_pods_is_listed_at_most_every_ten_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[float] = []

    async def reconcile(_deps: Dependencies, _name: Name, callbacks: Callbacks) -> float | None:
        begun.append(asyncio.get_running_loop().time())
        callbacks.children_listed(10_000)
        return None

    monkeypatch.setattr(module, "reconcile", reconcile)

    async def main() -> None:
        loop = make_loop(Server())
        loop.job_changed("ADDED", make_job("a"))
        async with loop._queue.run_workers(2):
            for second in range(100):
                loop.job_changed("MODIFIED", make_job("a", version=second + 2))
                await asyncio.sleep(1)

    virtual_time.run(main())
    assert 10 <= len(begun) <= 12


def test_jobs_of_one_namespace_do_not_delay_another_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    names = record_passes(monkeypatch)

    async def main() -> None:
        loop = make_loop(Server())
        for number in range(200):
            loop.job_changed("ADDED", make_job(f"job-{number}"))
        hers = make_job("hers")
        hers["metadata"]["namespace"] = "alice"
        loop.job_changed("ADDED", hers)
        await _run_workers(loop)

    virtual_time.run(main())
    assert names.index(Name("alice", "hers")) < 5

"""A namespace without permissions, or unreadable jobs, may cost the loop and all other jobs only little."""

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import pytest
from kubernetes.aio.client import ApiException
from pseudoreal_api.wire.reports import PodReport
from pseudoreal_operator.cluster.api import Json, Name
from pseudoreal_operator.loop import loop as module
from pseudoreal_operator.loop.reconcile import Callbacks, Dependencies
from pseudoreal_operator.observe.report_store import ReportingPod
from pseudoreal_operator.observe.stages import Execution, StageKind
from pseudoreal_operator.tasks import background_task

from tests.unit.operator.cluster.support import virtual_time
from tests.unit.operator.loop.test_loop import Server, make_job, make_loop, record_passes
from tests.unit.operator.observe.support.reports import PODS


class Forbidding(Server):
    """A fake API server; lists of the namespace `forbidden` fail with status 403."""

    async def each(  # type: ignore[override]
        self, kind: str, namespace: str | None, *_: Any, **_also: Any
    ) -> AsyncIterator[Json]:
        if namespace == "forbidden":
            raise ApiException(status=403)
        for body in self.jobs if kind == "PseudoRealJob" else ():
            yield body


def test_changes_beside_a_namespace_without_permissions_take_no_memory() -> None:
    async def main() -> None:
        loop = make_loop(Forbidding(), "n", "forbidden")
        loop.job_changes_missed()
        async with background_task("list", loop._list_jobs()):
            for number in range(100):
                await asyncio.sleep(1)
                loop.job_changed("ADDED", make_job(f"job-{number}"))
        assert not loop.has_seen_all
        assert not loop._changed_meanwhile

    virtual_time.run(main())


def test_namespace_without_permissions_does_not_keep_reports_of_others_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator is not ready, but it leads, and its Service selects it nevertheless."""

    async def reconcile(deps: Dependencies, name: Name, _callbacks: Callbacks) -> float | None:
        deps.report_store.follow((name.namespace, name.name), PODS)
        return None

    monkeypatch.setattr(module, "reconcile", reconcile)

    async def main() -> None:
        server = Forbidding()
        server.jobs = [make_job("a")]
        loop = make_loop(server, "forbidden", "n")
        loop.job_changes_missed()
        async with background_task("list", loop._list_jobs()), loop.lead():
            await asyncio.sleep(1)
            pod = ReportingPod(("n", "a"), Execution("pseudo", StageKind.TRAIN, 1), 0, "pod")
            assert loop._deps.report_store.store(pod, PodReport(), datetime.now(UTC))
            assert not loop.has_seen_all

    virtual_time.run(main())


def test_job_that_changes_and_cannot_be_read_gets_a_pass_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    names = record_passes(monkeypatch)

    async def main() -> None:
        loop = make_loop(Server())
        async with loop._queue.run_workers(2):
            for _ in range(590):
                loop.job_unreadable("n", "deep")
                await asyncio.sleep(0.1)
            assert names == [Name("n", "deep")]
            loop.job_unreadable("n", "other")
            await asyncio.sleep(2)
            assert names == [Name("n", "deep"), Name("n", "other"), Name("n", "deep")], "the last change is read, too"

    virtual_time.run(main())


def test_children_of_an_unreadable_job_cause_no_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    names = list[Name]()

    async def reconcile(_deps: Dependencies, name: Name, callbacks: Callbacks) -> float | None:
        names.append(name)
        callbacks.unreadable()
        return None

    monkeypatch.setattr(module, "reconcile", reconcile)

    async def main() -> None:
        loop = make_loop(Server())
        async with loop._queue.run_workers(2):
            for _ in range(590):
                loop._queue.add(Name("n", "deep"))  # as for an event of a child
                await asyncio.sleep(0.1)
            assert names == [Name("n", "deep")]
            await asyncio.sleep(2)
            assert names == [Name("n", "deep")] * 2

    virtual_time.run(main())


@pytest.mark.parametrize("metadata", [None, {}, {"name": "a"}, {"namespace": "n"}])
def test_job_without_a_name_is_not_requested(metadata: Json | None, monkeypatch: pytest.MonkeyPatch) -> None:
    names = record_passes(monkeypatch)

    async def main() -> None:
        loop = make_loop(Server())
        loop.job_changed("MODIFIED", {"metadata": metadata})
        async with loop._queue.run_workers(2):
            await asyncio.sleep(1)

    virtual_time.run(main())
    assert names == []

"""A watch survives any failure of its connection, and says when it may have missed changes."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

import pytest
from aiohttp import ClientPayloadError
from kubernetes.aio.client import ApiException
from pseudoreal_operator.cluster.api import Api, Json
from pseudoreal_operator.cluster.bounds import Unreadable
from pseudoreal_operator.cluster.watch import Watch
from pseudoreal_operator.metrics.registry import REGISTRY
from pseudoreal_operator.observe.memory import Memory

from tests.unit.operator.cluster.support import virtual_time

FOREVER = "nothing more happens"


def make_change(version: int, kind: str = "MODIFIED") -> tuple[str, Json]:
    return kind, {"metadata": {"name": f"pod-{version}", "resourceVersion": str(version)}}


class Server:
    """A fake API server: each argument lists the changes that one connection of the watch sends; an exception ends
    the connection."""

    def __init__(self, *connections: list[Any], versions: list[Any] | None = None) -> None:
        self._connections, self._versions = list(connections), versions or []
        self.listed = 0
        self.versions_requested: list[str] = []
        self.reported: list[str] = []
        self.reported_at: list[float] = []
        self.missed = 0
        self.fails_at = ""
        self.present: list[Json] = []
        self.present_version = "100"
        self.store = Memory().watch("Pod", None)
        self.was_current: list[bool] = []
        """Whether the memory could be used, at each change and at each time at which changes may have been missed."""

    async def each(
        self, *_: str, listed: Callable[[str], object], skipped: Callable[[Json, Unreadable], None]
    ) -> AsyncIterator[Json]:
        self.listed += 1
        found = self._versions.pop(0) if self._versions else str(100 * self.listed)
        if isinstance(found, Exception):
            raise found
        listed(str(found))
        skipped({"metadata": {}}, Unreadable("TooDeep", "it is deep"))
        for body in self.present:
            yield body

    async def watch(
        self, _kind: str, _namespace: str, _label: str, version: str, *, opened: Callable[[], object]
    ) -> AsyncIterator[tuple[str, Json]]:
        self.versions_requested.append(version)
        opened()
        for change in self._connections.pop(0) if self._connections else [FOREVER]:
            if change == FOREVER:
                await asyncio.sleep(1e9)
            if isinstance(change, Exception):
                raise change
            yield change  # type: ignore[misc]

    async def version(self, *_: str) -> str:
        return self.present_version

    def run(self) -> None:
        async def main() -> None:
            started = asyncio.Event()
            watch = Watch(cast(Api, self), "Pod", None, "label", self.store, self._on_change, self._on_missed)
            task = asyncio.create_task(watch.run(started))
            await started.wait()
            await asyncio.sleep(3000)
            assert not task.done(), "it never ends"
            task.cancel()

        virtual_time.run(main())

    def _on_change(self, _change: str, body: Json) -> None:
        self.was_current.append(self.store.is_current)
        self.reported.append(body["metadata"]["name"])
        self.reported_at.append(asyncio.get_running_loop().time())
        if self.fails_at == body["metadata"]["name"]:
            raise KeyError("a mistake")

    def _on_missed(self) -> None:
        self.was_current.append(self.store.is_current)
        self.missed += 1


def test_watch_resumes_at_its_last_version() -> None:
    server = Server([make_change(101), make_change(105, "BOOKMARK")], [make_change(106)], [])
    server.run()
    assert (server.reported, server.versions_requested) == (["pod-101", "pod-106"], ["100", "105", "106", "106"])
    assert (server.listed, server.missed) == (1, 1)


def test_time_of_the_last_watch_event_is_a_metric() -> None:
    def moment() -> float:
        labels = {"kind": "Pod", "namespace": ""}
        return REGISTRY.get_sample_value("pseudoreal_watch_last_event_timestamp_seconds", labels) or 0.0

    started = time.time()
    Server([make_change(105, "BOOKMARK")]).run()
    assert started <= moment() <= time.time()


def test_watch_errors_lose_no_change_that_was_reported() -> None:
    server = Server(
        [make_change(101), ApiException(status=500)],
        [ClientPayloadError("half of it")],
        [OSError("cut")],
        [make_change(102)],
    )
    server.run()
    assert server.reported == ["pod-101", "pod-102"]
    assert set(server.versions_requested[1:4]) == {"101"}
    assert server.missed == 1


def test_expired_version_counts_as_missed_changes() -> None:
    server = Server([make_change(101)], [ApiException(status=410)], [make_change(201)])
    server.run()
    assert (server.versions_requested[:3], server.reported) == (["100", "101", "200"], ["pod-101", "pod-201"])
    assert server.missed == 2


def test_watch_retries_while_the_api_server_is_away_at_the_start() -> None:
    server = Server([make_change(8)], versions=[OSError("down"), ApiException(status=403), 7])
    server.run()
    assert (server.listed, server.reported, server.missed) == (3, ["pod-8"], 1)


def test_watch_pauses_between_connections_that_end_at_once() -> None:
    server = Server(*([[]] * 50))
    server.run()
    assert len(server.versions_requested) == 51


def test_unreadable_change_counts_as_missed_changes() -> None:
    """A watch that continued from the last known version would receive the unreadable change again and again."""
    server = Server([make_change(101), Unreadable("TooLarge", "too large")], [make_change(201)])
    server.run()
    assert (server.versions_requested[:2], server.reported, server.missed) == (
        ["100", "200"],
        ["pod-101", "pod-201"],
        2,
    )


def test_error_of_the_receiver_does_not_end_the_watch() -> None:
    server = Server([make_change(101), make_change(102)], [make_change(202)])
    server.fails_at = "pod-101"
    server.run()
    assert (server.reported, server.missed) == (["pod-101", "pod-202"], 2)


@pytest.mark.parametrize("error", [OSError("refused"), ApiException(status=503), ApiException(status=404)])
def test_watch_resumes_within_20_s_after_half_an_hour_without_an_api_server(error: Exception) -> None:
    back = 1800.0

    class Away(Server):
        async def watch(
            self, *versions_requested: str, opened: Callable[[], object]
        ) -> AsyncIterator[tuple[str, Json]]:
            if asyncio.get_running_loop().time() < back:
                raise error
            async for change in super().watch(*versions_requested, opened=opened):
                yield change

    server = Away([make_change(101)])
    server.run()
    assert back <= server.reported_at[0] < back + 20


def test_memory_is_used_while_its_watch_is_connected_and_has_listed() -> None:
    server = Server([make_change(101), OSError("cut")], [ApiException(status=410)], [make_change(201)])
    server.run()
    missed, told, missed_again, told_again = server.was_current
    assert (missed, told, missed_again, told_again) == (False, True, False, True)


def test_memory_is_used_again_once_the_watch_has_told_all_changes_since_it_was_cut() -> None:
    """The API server accepts the watch before it sends the backlog."""
    changes = [make_change(101), OSError("cut")], [make_change(102), make_change(150, "BOOKMARK"), make_change(151)]
    server = Server(*changes)
    server.present_version = "150"
    server.run()
    missed, told, behind, told_all = server.was_current
    assert (missed, told, behind, told_all) == (False, True, False, True)


def test_list_after_a_cut_needs_no_backlog() -> None:
    server = Server([make_change(101), OSError("cut")], [ApiException(status=410)], [make_change(201)])
    server.present_version = "100000"
    server.run()
    assert server.was_current == [False, True, False, True]


@pytest.mark.parametrize("error", [OSError("cut"), ApiException(status=410)])
def test_memory_is_not_used_while_its_watch_is_cut(error: Exception) -> None:
    class Away(Server):
        async def watch(
            self, *versions_requested: str, opened: Callable[[], object]
        ) -> AsyncIterator[tuple[str, Json]]:
            if self.versions_requested:
                await asyncio.sleep(1e9)
            async for change in super().watch(*versions_requested, opened=opened):
                yield change

    server = Away([make_change(101), error])
    server.run()
    assert server.was_current[:2] == [False, True]
    assert not server.store.is_current

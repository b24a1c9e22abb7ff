"""A watch survives any failure of its connection, and says when it may have missed changes."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest
from aiohttp import ClientPayloadError
from kubernetes.aio.client import ApiException
from pseudoreal_operator.cluster.api import Api, Json
from pseudoreal_operator.cluster.bounds import Unreadable
from pseudoreal_operator.cluster.watch import Watch
from pseudoreal_operator.metrics.registry import REGISTRY

from tests.unit.operator.cluster.support import virtual_time

FOREVER = "nothing more happens"


def change(version: int, kind: str = "MODIFIED") -> tuple[str, Json]:
    return kind, {"metadata": {"name": f"pod-{version}", "resourceVersion": str(version)}}


class Server:
    """A fake API server: each argument lists the changes that one connection of the watch sends; an exception ends
    the connection."""

    def __init__(self, *connections: list[Any], versions: list[Any] | None = None) -> None:
        self._connections, self._versions = list(connections), versions or []
        self.listed = 0
        self.asked: list[str] = []
        self.told: list[str] = []
        self.told_at: list[float] = []
        self.missed = 0
        self.chokes_on = ""

    async def version(self, *_: str) -> str:
        self.listed += 1
        found = self._versions.pop(0) if self._versions else str(100 * self.listed)
        if isinstance(found, Exception):
            raise found
        return str(found)

    async def watch(self, _kind: str, _namespace: str, _label: str, version: str) -> AsyncIterator[tuple[str, Json]]:
        self.asked.append(version)
        for told in self._connections.pop(0) if self._connections else [FOREVER]:
            if told == FOREVER:
                await asyncio.sleep(1e9)
            if isinstance(told, Exception):
                raise told
            yield told  # type: ignore[misc]

    def run(self) -> None:
        async def main() -> None:
            begun = asyncio.Event()
            watch = Watch(cast(Api, self), "Pod", None, "label", self._tell, self._miss)
            task = asyncio.create_task(watch.run(begun))
            await begun.wait()
            await asyncio.sleep(3000)
            assert not task.done(), "it never ends"
            task.cancel()

        virtual_time.run(main())

    def _tell(self, _change: str, body: Json) -> None:
        self.told.append(body["metadata"]["name"])
        self.told_at.append(asyncio.get_running_loop().time())
        if self.chokes_on == body["metadata"]["name"]:
            raise KeyError("a mistake")

    def _miss(self) -> None:
        self.missed += 1


def test_a_connection_that_ends_is_taken_up_where_it_was() -> None:
    server = Server([change(101), change(105, "BOOKMARK")], [change(106)], [])
    server.run()
    assert (server.told, server.asked) == (["pod-101", "pod-106"], ["100", "105", "106", "106"])
    assert (server.listed, server.missed) == (1, 1)


def test_what_was_told_last_is_known_to_those_who_watch_the_watch() -> None:
    def moment() -> float:
        labels = {"kind": "Pod", "namespace": ""}
        return REGISTRY.get_sample_value("pseudoreal_watch_last_event_timestamp_seconds", labels) or 0.0

    begun = time.time()
    Server([change(105, "BOOKMARK")]).run()
    assert begun <= moment() <= time.time()


def test_an_error_in_the_stream_or_a_cut_object_costs_nothing_that_was_told() -> None:
    server = Server(
        [change(101), ApiException(status=500)], [ClientPayloadError("half of it")], [OSError("cut")], [change(102)]
    )
    server.run()
    assert server.told == ["pod-101", "pod-102"]
    assert set(server.asked[1:4]) == {"101"}
    assert server.missed == 1


def test_a_version_that_expired_is_a_gap() -> None:
    server = Server([change(101)], [ApiException(status=410)], [change(201)])
    server.run()
    assert (server.asked[:3], server.told) == (["100", "101", "200"], ["pod-101", "pod-201"])
    assert server.missed == 2


def test_an_api_server_that_is_away_at_the_start_is_asked_again() -> None:
    server = Server([change(8)], versions=[OSError("down"), ApiException(status=403), 7])
    server.run()
    assert (server.listed, server.told, server.missed) == (3, ["pod-8"], 1)


def test_an_api_server_that_hangs_up_at_once_is_not_asked_without_a_pause() -> None:
    server = Server(*([[]] * 50))
    server.run()
    assert len(server.asked) == 51


def test_a_change_of_which_nothing_can_be_read_is_a_gap() -> None:
    """A watch that continued from the last known version would receive the unreadable change again and again."""
    server = Server([change(101), Unreadable("TooLarge", "too large")], [change(201)])
    server.run()
    assert (server.asked[:2], server.told, server.missed) == (["100", "200"], ["pod-101", "pod-201"], 2)


def test_a_mistake_of_who_is_told_does_not_end_it() -> None:
    server = Server([change(101), change(102)], [change(202)])
    server.chokes_on = "pod-101"
    server.run()
    assert (server.told, server.missed) == (["pod-101", "pod-202"], 2)


@pytest.mark.parametrize("error", [OSError("refused"), ApiException(status=503), ApiException(status=404)])
def test_an_api_server_that_is_back_after_half_an_hour_is_noticed_within_20_s(error: Exception) -> None:
    back = 1800.0

    class Away(Server):
        async def watch(self, *asked: str) -> AsyncIterator[tuple[str, Json]]:
            if asyncio.get_running_loop().time() < back:
                raise error
            async for told in super().watch(*asked):
                yield told

    server = Away([change(101)])
    server.run()
    assert back <= server.told_at[0] < back + 20

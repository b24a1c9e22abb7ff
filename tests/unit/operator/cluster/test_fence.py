"""A write is sent only while the fence is open, whenever it closes; a read is always sent."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import ClientSession, TraceConfig, web
from pseudoreal_operator.cluster.fence import Fence, NotLeading, boot_seconds
from pseudoreal_operator.cluster.retry import API_ERRORS

WRITES = ("POST", "PATCH", "PUT", "DELETE")


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Server:
    """A fake API server; `received` lists the methods of the requests that arrived."""

    def __init__(self) -> None:
        self.received: list[str] = []

    async def _answer(self, request: web.Request) -> web.Response:
        self.received.append(request.method)
        return web.Response()

    @asynccontextmanager
    async def session(self, fence: Fence, traces: list[TraceConfig] | None = None) -> AsyncIterator[ClientSession]:
        application = web.Application()
        application.router.add_route("*", "/", self._answer)
        runner = web.AppRunner(application, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        address = "http://{}:{}".format(*runner.addresses[0])
        settings: dict[str, Any] = {"middlewares": (fence.guard,), "request_class": fence.request_class()}
        async with ClientSession(address, trace_configs=traces, **settings) as session:
            yield session
        await runner.cleanup()


@pytest.mark.parametrize("method", WRITES)
async def test_only_an_open_fence_lets_a_write_through(method: str) -> None:
    server, clock = Server(), Clock()
    fence = Fence(clock)
    async with server.session(fence) as session:
        with pytest.raises(NotLeading):
            await session.request(method, "/")
        fence.open_until(110)
        await session.request(method, "/")
        clock.now = 110
        with pytest.raises(NotLeading):
            await session.request(method, "/")
        fence.open_until(120)
        fence.close()
        with pytest.raises(NotLeading, match="does not hold the Lease"):
            await session.request(method, "/")
        await session.get("/")
    assert server.received == [method, "GET"]


@pytest.mark.parametrize("method", WRITES)
async def test_fence_that_closes_while_the_connection_is_made_stops_the_write(method: str) -> None:
    server, fence, made = Server(), Fence(), TraceConfig()
    fence.open_until(boot_seconds() + 600)

    async def close(*_: object) -> None:
        fence.close()

    made.on_connection_create_end.append(close)
    async with server.session(fence, [made]) as session:
        with pytest.raises(NotLeading):
            await session.request(method, "/")
    assert server.received == []
    assert fence.has_answers_for(600), "what was not sent cannot arrive"


def test_closed_fence_counts_as_an_unavailable_api_server() -> None:
    assert issubclass(NotLeading, API_ERRORS)


def test_fence_remembers_a_write_without_an_answer() -> None:
    clock = Clock()
    fence = Fence(clock)
    fence.open_until(1000)
    with fence.track_write():
        pass
    assert fence.has_answers_for(15)
    with pytest.raises(ZeroDivisionError), fence.track_write():
        raise ZeroDivisionError
    assert not fence.has_answers_for(15)
    clock.now += 15
    assert fence.has_answers_for(15)

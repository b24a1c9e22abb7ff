"""Operators that compete for a Lease, in virtual time."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

from pseudoreal_operator.cluster.fence import Fence
from pseudoreal_operator.cluster.lease import LeaseLost, keep_lease
from pseudoreal_operator.settings import Lease

from tests.unit.operator.cluster.support.fake_leases import Client, Server

HOUR = 3600.0


def lease(holder: str) -> Lease:
    return Lease("pseudoreal", "pseudoreal", holder)


def now() -> float:
    return asyncio.get_running_loop().time()


class RecordingFence(Fence):
    """A fence that records in `turns` from when to when it was open."""

    def __init__(self) -> None:
        super().__init__(now)
        self.turns: list[tuple[float, float]] = []

    def open_until(self, moment: float) -> None:
        super().open_until(moment)
        if moment > now():
            self.turns.append((now(), moment))

    def close(self) -> None:
        super().close()
        if self.turns:
            began, end = self.turns.pop()
            self.turns.append((began, min(end, now())))


class Operator:
    """An operator that works for an hour once it holds the Lease; `began` and `ended` say when."""

    def __init__(self, server: Server, name: str, delay: Callable[[], float | None] = lambda: 0.0) -> None:
        self.client, self.name, self.fence = Client(server, delay), name, RecordingFence()
        self.began: float | None = None
        self.ended: float | None = None
        self.task = asyncio.create_task(self._hold_lease())

    async def _hold_lease(self) -> None:
        async with keep_lease(self.client, lease(self.name), self.fence):
            self.began = now()
            try:
                await asyncio.sleep(HOUR)
            finally:
                self.ended = now()

    @property
    def is_working(self) -> bool:
        """Whether the operator holds the Lease and may write."""
        return self.began is not None and self.ended is None and self.fence.is_open

    def cut_off(self) -> None:
        self.client.delay = lambda: None

    async def stop(self) -> None:
        """Stop the operator as SIGTERM does."""
        self.task.cancel()
        with suppress(asyncio.CancelledError):
            await self.task

    async def crash(self) -> None:
        self.cut_off()
        await self.stop()


@asynccontextmanager
async def run_two_operators(server: Server) -> AsyncIterator[tuple[Operator, Operator]]:
    """Yield two operators: the first holds the Lease, and the second waits."""
    first = Operator(server, "first")
    await asyncio.sleep(1)
    second = Operator(server, "second")
    await asyncio.sleep(60)
    assert first.is_working
    assert not second.is_working
    yield first, second
    for one in (first, second):
        with suppress(LeaseLost):
            await one.stop()

"""The client for asyncio. Each request of a `Client` is sent in a thread; the event loop never waits for it.

The command line starts in a third of a second because it loads no asyncio HTTP library, and its requests are few. So
there is one implementation, which is synchronous, and this face of it. A stream (watch, logs) has a thread of its own;
when the caller leaves it or is cancelled, its connection is shut down, which ends the thread.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from typing import Any, Protocol, TypeVar

from pseudoreal_api.status.status import PseudoRealJobStatus

from pseudoreal.client import Client, Jobs, Rows, Until, check_awaited, has_reached, timed_out
from pseudoreal.job import Job
from pseudoreal.logs import LogLine

T_co = TypeVar("T_co", covariant=True)
_END = object()


class _Stream(Protocol[T_co]):
    def __next__(self) -> T_co: ...

    def close(self) -> None: ...


async def _items(stream: _Stream[T_co]) -> AsyncGenerator[T_co]:
    executor, loop = ThreadPoolExecutor(1, "pseudoreal"), asyncio.get_running_loop()
    try:
        while (item := await loop.run_in_executor(executor, next, stream, _END)) is not _END:
            yield item  # type: ignore[misc]  # it is no _END
    finally:
        stream.close()
        executor.shutdown(wait=False)


class AsyncClient:
    """Jobs of one namespace of a cluster, for asyncio. Arguments, results and errors are those of `Client`.

    >>> import asyncio
    >>> async def first_state():
    ...     client = AsyncClient()
    ...     await client.submit(Job.from_yaml("examples/quickstart.yaml"))
    ...     async for status in client.watch("quickstart"):
    ...         return status.state
    >>> asyncio.run(first_state())
    'Pending'
    """

    def __init__(
        self,
        context: str | None = None,
        namespace: str | None = None,
        *,
        kubeconfig: str | None = None,
        warn: Callable[[str], None] | None = None,
    ) -> None:
        self.client = Client(context, namespace, kubeconfig=kubeconfig, **({"warn": warn} if warn else {}))
        """The synchronous client."""

    async def submit(self, job: Job | Mapping[str, Any], *, dry_run: bool = False) -> Job:
        return await asyncio.to_thread(self.client.submit, job, dry_run=dry_run)

    async def get(self, name: str) -> Job:
        return await asyncio.to_thread(self.client.get, name)

    async def list(self, *, all_namespaces: bool = False) -> Jobs:
        return await asyncio.to_thread(self.client.list, all_namespaces=all_namespaces)

    def watch(self, name: str) -> AsyncGenerator[PseudoRealJobStatus]:
        return _items(self.client.watch(name))

    async def wait(self, name: str, until: Until = "Complete", timeout: float | None = None) -> PseudoRealJobStatus:
        check_awaited(until)
        status: PseudoRealJobStatus | None = None
        try:
            async with asyncio.timeout(timeout), aclosing(_items(self.client.watch(name))) as statuses:
                async for status in statuses:
                    if has_reached(until, status, name):
                        return status
        except TimeoutError:
            raise timed_out(until, status, name, timeout) from None
        raise AssertionError("a watch ends with the job")

    def logs(
        self,
        name: str,
        *,
        rank: int | None = None,
        previous: bool = False,
        follow: bool = False,
        tail: int | None = None,
    ) -> AsyncGenerator[LogLine]:
        return _items(self.client.logs(name, rank=rank, previous=previous, follow=follow, tail=tail))

    async def metrics(self, name: str) -> Rows:
        return await asyncio.to_thread(self.client.metrics, name)

    async def suspend(self, name: str) -> str:
        return await asyncio.to_thread(self.client.suspend, name)

    async def resume(self, name: str) -> str:
        return await asyncio.to_thread(self.client.resume, name)

    async def finish_phase(self, name: str, phase: str | None = None) -> str:
        return await asyncio.to_thread(self.client.finish_phase, name, phase)

    async def repeat_phase(self, name: str, phase: str) -> str:
        return await asyncio.to_thread(self.client.repeat_phase, name, phase)

    async def delete(self, name: str) -> None:
        await asyncio.to_thread(self.client.delete, name)

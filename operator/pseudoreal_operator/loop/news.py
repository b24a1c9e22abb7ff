"""Events, best effort: kept in a bounded memory until the API server takes them. No job waits for one."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from random import random
from typing import Any

import structlog
from kubernetes.aio.client import ApiException
from pseudoreal_api.status.status import PseudoRealJobStatus

from pseudoreal_operator.cluster.api import Api, Name, message_of
from pseudoreal_operator.cluster.retry import Pause, pause_after
from pseudoreal_operator.loop.counts import Counts
from pseudoreal_operator.loop.queue import WorkQueue

Json = dict[str, Any]

MOST_WAITING = 2000
MOST_TRIES = 8
"""Number of tries to post an event: about two minutes."""
LAST_SECONDS = 1.0
_WORKERS = 2
_FINAL = (400, 403, 422)
"""HTTP statuses after which an event is given up: the namespace takes no more events, or not this one."""

log = structlog.get_logger()


class News:
    def __init__(self, api: Api, counts: Counts) -> None:
        self._api, self._counts = api, counts
        self._waiting: dict[Name, deque[Json]] = {}
        self._held: dict[str, tuple[PseudoRealJobStatus, Sequence[Json]]] = {}
        self._queue: WorkQueue[Name] = WorkQueue(self._post_first, self._failed)
        self._all_told = asyncio.Event()
        self._all_told.set()

    @asynccontextmanager
    async def posting(self) -> AsyncIterator[None]:
        """A context in which events are posted. At its end those that wait have LAST_SECONDS."""
        async with self._queue.workers(_WORKERS):
            try:
                yield
            finally:
                with suppress(TimeoutError):
                    async with asyncio.timeout(LAST_SECONDS):
                        await self._all_told.wait()

    def hold(self, job: str, status: PseudoRealJobStatus, events: Sequence[Json]) -> None:
        """Keeps the events of a status that may be written or not, as its answer did not come. `job`: its uid."""
        self._held[job] = (status, events)

    def settle(self, job: str, status: PseudoRealJobStatus) -> Sequence[Json]:
        """The events that were held for the status that the job turned out to have."""
        held, events = self._held.pop(job, (None, ()))
        return events if held == status else ()

    def forget(self, job: str) -> None:
        self._held.pop(job, None)

    def tell(self, job: Name, events: Iterable[Json]) -> None:
        """Posts the events of a job one after the other, in that order."""
        for event in events:
            if sum(map(len, self._waiting.values())) >= MOST_WAITING:
                self._lose(event, "too many events wait")
                continue
            self._waiting.setdefault(job, deque()).append(event)
            self._all_told.clear()
            self._queue.add(job)

    async def _post_first(self, job: Name) -> float | None:
        event = self._waiting[job][0]
        try:
            await self._api.post(event)
        except ApiException as error:
            if error.status not in _FINAL:
                raise
            self._lose(event, message_of(error))
        else:
            log.info("event", reason=event["reason"], message=event["message"], job=f"{job.namespace}/{job.name}")
        return self._next(job)

    def _failed(self, job: Name, error: Exception, failures: int) -> Pause:
        if failures >= MOST_TRIES:
            self._lose(self._waiting[job][0], f"{type(error).__name__}: {error}")
            if self._next(job) is None:
                self._queue.forget(job)
        return pause_after(error, failures, random())

    def _next(self, job: Name) -> float | None:
        """Takes the first event off: 0 when another one waits, else None."""
        self._waiting[job].popleft()
        if self._waiting[job]:
            return 0.0
        del self._waiting[job]
        if not self._waiting:
            self._all_told.set()
        return None

    def _lose(self, event: Json, why: str) -> None:
        self._counts.lost_events += 1
        log.warning("event_lost", reason=event["reason"], message=event["message"], error=why)

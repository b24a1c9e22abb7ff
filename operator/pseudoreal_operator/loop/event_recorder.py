"""Posts events, best effort: events wait in bounded memory until the API server accepts them. Passes do not wait for
events."""

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from random import random
from typing import Any

import structlog
from kubernetes.aio.client import ApiException
from pseudoreal_api.status.status import PseudoRealJobStatus

from pseudoreal_operator.cluster.api import Api, Name, message_of
from pseudoreal_operator.cluster.retry import Backoff, backoff_after
from pseudoreal_operator.loop.queue import WorkQueue
from pseudoreal_operator.metrics.registry import OperatorCounters

Json = dict[str, Any]

MOST_WAITING = 2000
_MOST_SHARE = 0.25
"""Share of MOST_WAITING that the events of one namespace may have."""
MOST_ATTEMPTS = 8
"""Maximum number of attempts to post an event; all attempts take about two minutes."""
SHUTDOWN_SECONDS = 1.0
_WORKERS = 2
_FINAL = (400, 403, 422)
"""HTTP statuses after which an event is dropped: the namespace accepts no more events, or rejects this one."""

log = structlog.get_logger()


class EventRecorder:
    """Queue of events to post: in order within a job, at most MOST_WAITING in all."""

    def __init__(self, api: Api, counters: OperatorCounters) -> None:
        self._api, self._counters = api, counters
        self._waiting: dict[Name, deque[Json]] = {}
        self._held: dict[str, tuple[PseudoRealJobStatus, Sequence[Json]]] = {}
        self._queue: WorkQueue[Name] = WorkQueue(self._post_first, self._backoff, lambda job: job.namespace)
        self._all_posted = asyncio.Event()
        self._all_posted.set()

    @asynccontextmanager
    async def run_posters(self) -> AsyncIterator[None]:
        """Post events in this context. At its end, events that still wait have SHUTDOWN_SECONDS."""
        async with self._queue.run_workers(_WORKERS, "poster of events"):
            try:
                yield
            finally:
                with suppress(TimeoutError):
                    async with asyncio.timeout(SHUTDOWN_SECONDS):
                        await self._all_posted.wait()

    def hold(self, job: str, status: PseudoRealJobStatus, events: Sequence[Json]) -> None:
        """Keep the events of a status write that got no answer: the status may be stored or not. `job`: uid of the
        job."""
        self._held[job] = (status, events)

    def take_held(self, job: str, status: PseudoRealJobStatus) -> Sequence[Json]:
        """Remove the held events of the job. Return them if they were held with this `status`, because then the write
        was stored; else return an empty sequence."""
        held, events = self._held.pop(job, (None, ()))
        return events if held == status else ()

    def forget(self, job: str) -> None:
        self._held.pop(job, None)

    def post(self, job: Name, events: Iterable[Json]) -> None:
        """Queue the events of a job, to be posted one after the other in this order."""
        for event in events:
            waiting = Counter({name: len(events) for name, events in self._waiting.items()})
            of_namespace = sum(count for name, count in waiting.items() if name.namespace == job.namespace)
            if waiting.total() >= MOST_WAITING or of_namespace >= max(1, MOST_WAITING * _MOST_SHARE):
                self._drop(event, "too many events wait")
                continue
            self._waiting.setdefault(job, deque()).append(event)
            self._all_posted.clear()
            self._queue.add(job)

    async def _post_first(self, job: Name) -> float | None:
        if not (waiting := self._waiting.get(job)):
            return None
        event = waiting[0]
        try:
            await self._api.post(event)
        except ApiException as error:
            if error.status not in _FINAL:
                raise
            self._drop(event, message_of(error))
        else:
            log.info(
                "event_posted", reason=event["reason"], message=event["message"], job=f"{job.namespace}/{job.name}"
            )
        return self._pop_first(job)

    def _backoff(self, job: Name, error: Exception, failures: int) -> Backoff | None:
        if failures >= MOST_ATTEMPTS and (waiting := self._waiting.get(job)):
            self._drop(waiting[0], f"{type(error).__name__}: {error}")
            if self._pop_first(job) is None:
                return None
        return backoff_after(error, failures, random())

    def _pop_first(self, job: Name) -> float | None:
        """Drop the first event of the job. Return the seconds until the next event is posted: 0 if another event waits;
        None if no event waits."""
        waiting = self._waiting.get(job) or deque()
        if waiting:
            waiting.popleft()
        if waiting:
            return 0.0
        self._waiting.pop(job, None)
        if not self._waiting:
            self._all_posted.set()
        return None

    def _drop(self, event: Json, why: str) -> None:
        self._counters.lost_events += 1
        log.warning("event_lost", reason=event["reason"], message=event["message"], error=why)

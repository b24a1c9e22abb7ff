"""A work queue: keys wait for a pass, at once or later, by a few workers.

Invariants: a key has one pass at a time. A key that is added during its pass gets another pass afterwards, so no
wake-up is lost. A pass that comes early also serves the passes requested for later, and its result says when the next
pass is due. Groups of keys (namespaces) take turns, and one group never occupies all of several workers. Changes come
before the backlog, except in every fourth pass, so neither waits until the other is empty. A worker survives any error
of a pass.
"""

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Generic, TypeVar

import structlog

from pseudoreal_operator.cluster.retry import Backoff
from pseudoreal_operator.metrics.registry import WORKER_ERRORS
from pseudoreal_operator.tasks import allow_end, background_task

FINISH_SECONDS = 5.0
"""Seconds that a pass has to end when the operator shuts down; a pass is a few requests."""
_CHANGES_IN_A_ROW = 3
"""Number of passes over changes after which one pass over the backlog follows."""
_OTHERS_SHARE = 0.25
"""Share of the workers that one group leaves to other groups; at least one worker, if there are several."""
_CLOSED_SECONDS = 0.25
"""Seconds between two checks whether a closed queue is open."""
_BUG_SECONDS = 60.0
"""Seconds until the next pass over a key if a pass has failed, and the handling of the failure has failed as well."""

Key = TypeVar("Key", bound=Hashable)

log = structlog.get_logger()


class _FairQueue(Generic[Key]):
    """Keys that wait. Groups take turns; the keys of a group are first in, first out."""

    def __init__(self, group: Callable[[Key], Hashable]) -> None:
        self._group = group
        self._groups: dict[Hashable, deque[Key]] = {}
        """Group -> its keys, in the order of the groups' turns."""

    def append(self, key: Key) -> None:
        self._groups.setdefault(self._group(key), deque()).append(key)

    def take(self, is_allowed: Callable[[Hashable], bool]) -> Key | None:
        """Remove and return the next key of a group that may have a pass; None if there is none."""
        for group in filter(is_allowed, self._groups):
            keys = self._groups.pop(group)
            key = keys.popleft()
            if keys:
                self._groups[group] = keys
            return key
        return None


class WorkQueue(Generic[Key]):
    """The queue and its workers.

    `work` makes a pass over a key and returns the seconds until the next pass; None: no pass until the key is added
    again. When `work` raises, `failed` is called with the key, the error and the number of failures in a row, and
    returns the backoff; None: no pass until the key is added again. `group` returns the group of a key. No pass starts
    while `is_open` returns False.
    """

    def __init__(
        self,
        work: Callable[[Key], Awaitable[float | None]],
        failed: Callable[[Key, Exception, int], Backoff | None],
        group: Callable[[Key], Hashable] = lambda _: None,
        is_open: Callable[[], bool] = lambda: True,
    ) -> None:
        self._work, self._failed, self._group, self._is_open = work, failed, group, is_open
        self._changes, self._backlog = _FairQueue(group), _FairQueue(group)
        """Keys that need a pass after a change, and keys with low priority. Both may still hold keys that were served
        or forgotten in the meantime."""
        self._changes_in_a_row = 0
        self._idle: deque[asyncio.Future[None]] = deque()
        """Futures of the workers that wait for a key."""
        self._pending: dict[Key, _FairQueue[Key]] = {}
        """Keys that need a pass now, including keys with a running pass, and the queue where they wait."""
        self._running: set[Key] = set()
        self._running_of: Counter[Hashable] = Counter()
        """Number of running passes of each group."""
        self._most_of_group = 1
        self._timers: dict[Key, asyncio.TimerHandle] = {}
        self._failures: Counter[Key] = Counter()
        self._not_before: dict[Key, float] = {}
        self._busy: set[asyncio.Task[None]] = set()
        """Workers with a running pass."""
        self._is_stopping = False

    @property
    def depth(self) -> int:
        """Number of keys that wait for a pass."""
        return len(self._pending.keys() - self._running)

    def add_backlog(self, key: Key) -> None:
        """Request a pass over the key with low priority."""
        if key in self._not_before:
            self.add(key)
        elif key not in self._pending:
            self._enqueue(key, self._backlog)

    def add(self, key: Key, after: float = 0.0) -> None:
        """Request a pass over the key in `after` seconds, or earlier."""
        loop = asyncio.get_running_loop()
        moment = max(loop.time() + after, self._not_before.get(key, 0.0))
        known = self._timers.get(key)
        if self._pending.get(key) is self._changes or (known and known.when() <= moment):
            return
        if moment <= loop.time():
            self._make_due(key)
            return
        self._drop_timer(key)
        self._timers[key] = loop.call_at(moment, self._make_due, key)

    def block(self, key: Key, seconds: float) -> None:
        """Allow no pass over the key in the next `seconds`, even if the key is added."""
        loop = asyncio.get_running_loop()
        self._not_before[key] = loop.time() + seconds
        if (timer := self._timers.get(key)) and timer.when() < self._not_before[key]:
            self._drop_timer(key)
            self.add(key)

    def forget(self, key: Key) -> None:
        """Forget the key, for which nothing is left to do; a running pass finishes."""
        self._drop_timer(key)
        self._pending.pop(key, None)
        self._failures.pop(key, None)
        self._not_before.pop(key, None)

    @asynccontextmanager
    async def run_workers(self, count: int, name: str = "worker") -> AsyncIterator[None]:
        """Run the workers in this context. At its end no pass starts any more; running passes have FINISH_SECONDS to
        end, and are then cancelled."""
        self._most_of_group = max(1, count - max(1, int(count * _OTHERS_SHARE)))
        async with AsyncExitStack() as stack:
            workers = [background_task(f"{name} {n}", self._run_worker()) for n in range(count)]
            tasks = [await stack.enter_async_context(worker) for worker in workers]
            try:
                yield
            finally:
                # First no new pass, then time for the running passes: a cancelled pass may leave a write without an
                # answer, and then the Lease is not released early (`lease._release`).
                self._is_stopping = True
                for task in tasks:
                    allow_end(task)
                    if task not in self._busy:
                        task.cancel()
                await asyncio.wait(tasks, timeout=FINISH_SECONDS)
                for task in tasks:
                    task.cancel()

    def _make_due(self, key: Key) -> None:
        # The pass that is due now also serves the later pass that the timer would request. The result of a pass says
        # when the next pass is due, so nothing is lost with the timer.
        self._drop_timer(key)
        # A key in the backlog moves on to the changes. Its entry in the backlog stays, and is skipped by `_take`.
        if self._pending.get(key) is not self._changes:
            self._enqueue(key, self._changes)

    def _enqueue(self, key: Key, queue: _FairQueue[Key]) -> None:
        self._pending[key] = queue
        # During a pass over the key the mark in `_pending` is enough: `_process` adds the key again after the pass.
        if key not in self._running:
            queue.append(key)
            self._wake_worker()

    def _wake_worker(self) -> None:
        while self._idle:
            waiting = self._idle.popleft()
            if not waiting.done():
                waiting.set_result(None)
                return

    def _take(self) -> Key | None:
        """Remove and return the key for the next pass; None if no key may have a pass now."""
        is_backlogs_turn = self._changes_in_a_row >= _CHANGES_IN_A_ROW
        queues = (self._backlog, self._changes) if is_backlogs_turn else (self._changes, self._backlog)
        for queue in queues:
            while (key := queue.take(self._has_room)) is not None:
                # Skip keys that were served from the other queue or forgotten, and keys with a running pass.
                if key in self._pending and key not in self._running:
                    self._changes_in_a_row = self._changes_in_a_row + 1 if queue is self._changes else 0
                    return key
        return None

    def _has_room(self, group: Hashable) -> bool:
        return self._running_of[group] < self._most_of_group

    async def _run_worker(self) -> None:
        task = asyncio.current_task()
        assert task is not None, "each worker is a task"
        while not self._is_stopping:
            if not self._is_open():
                await asyncio.sleep(_CLOSED_SECONDS)
                continue
            key = self._take()
            if key is None:
                # After a pass a worker takes the next key itself, so only added keys have to wake an idle worker.
                self._idle.append(asyncio.get_running_loop().create_future())
                await self._idle[-1]
                continue
            self._busy.add(task)
            try:
                await self._process(key)
            except Exception as error:
                WORKER_ERRORS.inc()
                log.error("worker_failed", key=str(key), exc_info=error)
            finally:
                self._busy.discard(task)

    async def _process(self, key: Key) -> None:
        group = self._group(key)
        del self._pending[key]
        self._drop_timer(key)
        self._not_before.pop(key, None)
        self._running.add(key)
        self._running_of[group] += 1
        try:
            wait = await self._run_work(key)
        finally:
            self._running.discard(key)
            self._running_of[group] -= 1
            # Drops groups without a running pass: `+=` keeps only positive counts.
            self._running_of += Counter()
        # Added during the pass: another pass follows at once.
        if self._pending.pop(key, None) is not None:
            wait = 0.0
        if wait is not None:
            self.add(key, wait)

    async def _run_work(self, key: Key) -> float | None:
        try:
            wait = await self._work(key)
        except asyncio.CancelledError as cut:
            task = asyncio.current_task()
            if self._is_stopping or (task and task.cancelling()):
                raise
            return self._backoff_after(key, RuntimeError(f"something that a pass awaited was cancelled: {cut!r}"))
        except Exception as error:
            return self._backoff_after(key, error)
        self._failures.pop(key, None)
        return wait

    def _backoff_after(self, key: Key, error: Exception) -> float | None:
        """Count a failure; return the seconds until the next pass, or None: no pass until the key is added again."""
        self._failures[key] += 1
        try:
            pause = self._failed(key, error, self._failures[key])
        except Exception as mistake:
            WORKER_ERRORS.inc()
            log.error("worker_failed", key=str(key), exc_info=mistake)
            pause = Backoff(_BUG_SECONDS)
        if pause is None:
            self._failures.pop(key, None)
            return None
        if pause.is_retry_after:
            self.block(key, pause.seconds)
        return pause.seconds

    def _drop_timer(self, key: Key) -> None:
        if timer := self._timers.pop(key, None):
            timer.cancel()

"""A work queue: keys that are to be passed over, at once or later, by a few workers.

What holds: a key has one pass at a time; one that is added during its pass gets another one after it, so no wake-up is
lost; what was to come later is served by a pass that comes earlier, and that pass says when the next is due; what is
news comes before a backlog.
"""

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

from pseudoreal_operator.cluster.retry import Pause

FINISH_SECONDS = 5.0
"""Seconds that a pass has to end when the operator does: it is a few requests."""

Key = TypeVar("Key", bound=Hashable)


class WorkQueue(Generic[Key]):
    """The queue and its workers. `work` makes a pass, and returns the seconds until the next one; None: not before
    somebody adds the key. When it raises, `failed` says for how long to leave the key alone; it is told how often in a
    row."""

    def __init__(
        self, work: Callable[[Key], Awaitable[float | None]], failed: Callable[[Key, Exception, int], Pause]
    ) -> None:
        self._work, self._failed = work, failed
        self._news: deque[Key] = deque()
        self._backlog: deque[Key] = deque()
        """Keys of the backlog; it and the line of news may hold keys that were served or forgotten meanwhile."""
        self._ready = asyncio.Semaphore(0)
        """Counts the keys that both lines hold."""
        self._wanted: dict[Key, deque[Key]] = {}
        """Keys that are to have a pass now, those whose pass goes on among them, and the line where they wait."""
        self._running: set[Key] = set()
        self._later: dict[Key, asyncio.TimerHandle] = {}
        self._failures: Counter[Key] = Counter()
        self._not_before: dict[Key, float] = {}
        self._busy: set[asyncio.Task[None]] = set()
        """Workers whose pass goes on."""
        self._ends = False

    @property
    def depth(self) -> int:
        """Number of keys that wait for a pass."""
        return len(self._wanted.keys() - self._running)

    def add_backlog(self, key: Key) -> None:
        """Asks for a pass over the key when there is nothing else to do."""
        if key in self._not_before:
            self.add(key)
        elif key not in self._wanted:
            self._want(key, self._backlog)

    def add(self, key: Key, after: float = 0.0) -> None:
        """Asks for a pass over the key in `after` seconds, or earlier."""
        loop = asyncio.get_running_loop()
        moment = max(loop.time() + after, self._not_before.get(key, 0.0))
        known = self._later.get(key)
        if self._wanted.get(key) is self._news or (known and known.when() <= moment):
            return
        if moment <= loop.time():
            self._ripen(key)
            return
        self._drop_timer(key)
        self._later[key] = loop.call_at(moment, self._ripen, key)

    def forget(self, key: Key) -> None:
        """Forgets the key, for which there is nothing to do any more; a pass that goes on ends."""
        self._drop_timer(key)
        self._wanted.pop(key, None)
        self._recover(key)

    @asynccontextmanager
    async def workers(self, count: int) -> AsyncIterator[None]:
        """A context in which the workers make passes. At its end no pass begins any more, and those that go on have
        FINISH_SECONDS to end; then they are cut off."""
        tasks = [asyncio.create_task(self._serve(), name=f"worker {number}") for number in range(count)]
        try:
            yield
        finally:
            self._ends = True
            for task in tasks:
                if task not in self._busy:
                    task.cancel()
            await asyncio.wait(tasks, timeout=FINISH_SECONDS)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    def _ripen(self, key: Key) -> None:
        self._drop_timer(key)
        if self._wanted.get(key) is not self._news:
            self._want(key, self._news)

    def _want(self, key: Key, line: deque[Key]) -> None:
        self._wanted[key] = line
        if key not in self._running:
            line.append(key)
            self._ready.release()

    async def _serve(self) -> None:
        task = asyncio.current_task()
        assert task is not None, "this runs in a task"
        while not self._ends:
            await self._ready.acquire()
            key = (self._news or self._backlog).popleft()
            # Served from the other line, or forgotten, or added once more after that.
            if key in self._wanted and key not in self._running:
                self._busy.add(task)
                await self._serve_one(key)
                self._busy.discard(task)

    async def _serve_one(self, key: Key) -> None:
        del self._wanted[key]
        self._drop_timer(key)
        self._running.add(key)
        try:
            wait = await self._pass(key)
        finally:
            self._running.discard(key)
        if self._wanted.pop(key, None) is not None:
            wait = 0.0
        if wait is not None:
            self.add(key, wait)

    async def _pass(self, key: Key) -> float | None:
        try:
            wait = await self._work(key)
        except Exception as error:
            self._failures[key] += 1
            pause = self._failed(key, error, self._failures[key])
            if pause.binding:
                self._not_before[key] = asyncio.get_running_loop().time() + pause.seconds
            return pause.seconds
        self._recover(key)
        return wait

    def _recover(self, key: Key) -> None:
        self._failures.pop(key, None)
        self._not_before.pop(key, None)

    def _drop_timer(self, key: Key) -> None:
        if timer := self._later.pop(key, None):
            timer.cancel()

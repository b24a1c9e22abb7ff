"""Where the main thread of a rank is: it says so itself, when it begins to wait for other ranks and when it goes on.

No other thread says it in its place: one that lives on would hide a main thread that is stuck.
"""

import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext
from math import nan
from pathlib import Path
from typing import TypeVar

from pseudoreal_api.wire.reports import Place

from pseudoreal_trainer.heartbeat.first_failure import FirstFailure
from pseudoreal_trainer.heartbeat.side_thread import Clock, SideThread
from pseudoreal_trainer.heartbeat.stamp_file import StampFile

_T = TypeVar("_T")
_LOOK_SECONDS = 1.0
"""Between two looks of the main thread at the thread that it waits for."""
_STEPS = 10
"""Over which the busy time is taken."""
_NOTHING = nullcontext()

Ready = Callable[[float], bool]
"""Waits so many seconds at most; the result says whether what was waited for is there."""


class Stamps:
    """Says nothing: nobody listens."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self.reductions = SideThread("reduces gradients", clock)
        self.updates = SideThread("updates", clock)
        self.saving = SideThread("writes a checkpoint", clock)
        self.failure = FirstFailure()

    def wait(self, doing: str) -> AbstractContextManager[object]:  # noqa: ARG002
        """Around a wait of the main thread for other ranks. `doing`: for what, in 64 characters at most."""
        return _NOTHING

    @property
    def stalled(self) -> float:
        """Seconds that the main thread has waited for the threads that reduce and update, so far."""
        return self.reductions.stalled + self.updates.stalled

    def result(self, future: Future[_T], thread: SideThread) -> _T:
        """What another thread of this rank makes. Raises the first failure of any thread."""
        self.until(lambda seconds: future.done() or not wait([future], seconds).not_done, thread)
        return future.result()

    def until(self, ready: Ready, thread: SideThread) -> None:
        """Waits for another thread of this rank. While that does its own work, so does the rank. Raises the first
        failure of any thread: what failed may never make ready what is waited for."""
        if ready(0):
            self._passes()
        else:
            begin = self._clock()
            with self._looking(thread, begin) as look:
                while not ready(_LOOK_SECONDS):
                    self.failure.check()
                    look()
            thread.stalled += self._clock() - begin
        self.failure.check()

    def _passes(self) -> None:
        """By a wait that is over already."""

    @contextmanager
    def _looking(self, thread: SideThread, begin: float) -> Iterator[Callable[[], None]]:  # noqa: ARG002
        """Around a wait that takes a while; what it yields is called again and again."""
        yield lambda: None

    def does(self, doing: str) -> None:
        """What it computes from now on."""

    def stands(self, step: int) -> None:
        """So many steps are done."""

    def step(self) -> AbstractContextManager[object]:
        """Around a step."""
        return _NOTHING

    def save_begins(self) -> None: ...

    def save_ends(self) -> None:
        """It is committed. The thread that saves calls this."""

    def ends(self) -> None: ...


class FileStamps(Stamps):
    """Says it in a file. Only the main thread calls it, but for `save_ends`."""

    def __init__(self, path: Path, rank: int, clock: Clock = time.monotonic) -> None:
        super().__init__(clock)
        self._file = StampFile(path, os.getpid(), rank)
        self._place: Place = "starting"
        """While it does not wait."""
        self._doing = ""
        self._step = self._left = 0
        self._waited = 0.0
        self._busy: deque[float] = deque(maxlen=_STEPS)
        self._busy_seconds = self._save_began = nan
        self._say(self._place, self._doing, clock())

    @contextmanager
    def wait(self, doing: str) -> Iterator[None]:
        begin = self._clock()
        self._say("waiting", doing, begin)
        try:
            yield
        finally:
            self._goes_on(self._clock() - begin)

    def _passes(self) -> None:
        # It counts as well: ranks with the same plan leave the same waits.
        self._left += 1

    @contextmanager
    def _looking(self, thread: SideThread, begin: float) -> Iterator[Callable[[], None]]:
        waited = thread.waited()
        self._looks_at(thread, begin)
        try:
            yield lambda: self._looks_at(thread, begin)
        finally:
            self._goes_on(thread.waited() - waited)

    def does(self, doing: str) -> None:
        self._doing = doing
        self._say(self._place, doing, self._clock())

    def stands(self, step: int) -> None:
        self._step = step

    @contextmanager
    def step(self) -> Iterator[None]:
        begin, waited = self._clock(), self._waited
        self._place = "computing"
        self.does("a step")
        yield
        self._busy.append(self._clock() - begin - (self._waited - waited))
        self._busy_seconds = sum(self._busy) / len(self._busy)
        self._step += 1
        self.does("between steps")

    def save_begins(self) -> None:
        self._save_began = self._clock()
        self.does("begins to save")

    def save_ends(self) -> None:
        self._file.write_saved(self._clock())

    def ends(self) -> None:
        self._place = "ended"
        self.does("")

    def _looks_at(self, thread: SideThread, begin: float) -> None:
        waits_for, since = thread.now()
        place: Place = self._place if waits_for is None else "waiting"
        self._say(place, waits_for or thread.work, max(since, begin))

    def _goes_on(self, waited: float) -> None:
        self._waited += waited
        self._left += 1
        self._say(self._place, self._doing, self._clock())

    def _say(self, place: Place, doing: str, since: float) -> None:
        self._file.write(place, doing, since, self._step, self._left, self._busy_seconds, self._save_began)

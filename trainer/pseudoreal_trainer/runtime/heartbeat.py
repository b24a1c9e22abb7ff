"""Heartbeat of a rank: its main thread reports when it starts to wait for other ranks, and when it works again.

No other thread reports in its place: a thread that lives on would hide a main thread that is stuck.
"""

import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from math import nan
from typing import TypeVar

from pseudoreal_api.wire.reports import Activity

from pseudoreal_trainer.runtime.first_failure import FirstFailure
from pseudoreal_trainer.runtime.record import HeartbeatFile
from pseudoreal_trainer.runtime.side_thread import Clock, SideThread

_T = TypeVar("_T")
_LOOK_SECONDS = 1.0
"""Seconds between two looks of the main thread at the thread that it joins."""
_STEPS = 10
"""Training steps over which the busy time is averaged."""


class Heartbeat:
    """Heartbeat of a rank. Main thread only, except for `save_done`. The description of a wait or of work takes 64
    bytes at most."""

    def __init__(self, file: HeartbeatFile | None = None, clock: Clock = time.monotonic) -> None:
        """`file`: None if no process reads the heartbeat."""
        self._file, self._clock = file, clock
        self.reductions = SideThread("reduces gradients", clock)
        self.updates = SideThread("updates", clock)
        self.saving = SideThread("writes a checkpoint", clock)
        self.failure = FirstFailure()
        self._activity: Activity = "starting"
        """Activity of the main thread while it does not wait."""
        self._doing = ""
        self._step = self._waits = 0
        self._waited = 0.0
        self._busy: deque[float] = deque(maxlen=_STEPS)
        self._busy_seconds = self._save_began = nan
        self.working("")

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Context for a wait of the main thread for other ranks."""
        begin = self._clock()
        self._beat("waiting", what, begin)
        try:
            yield
        finally:
            self._works_again(self._clock() - begin)

    def working(self, what: str) -> None:
        """Report the work of the main thread from now on."""
        self._doing = what
        self._beat(self._activity, what, self._clock())

    def join(self, future: Future[_T], thread: SideThread) -> _T:
        """Wait for the result of another thread of this rank and return it.

        The rank counts as waiting only while that thread waits for other ranks. Raises the first failure of any thread:
        after a failure, the result may never come.
        """
        if future.done():
            # Counted as well: ranks with the same plan then leave the same waits, however fast their threads are.
            self._waits += 1
        else:
            begin = self._clock()
            self._wait_for(future, thread, begin)
            thread.stalled_seconds += self._clock() - begin
        self.failure.check()
        return future.result()

    @property
    def stalled_seconds(self) -> float:
        """Total seconds that the main thread has waited for the reduction and update threads."""
        return self.reductions.stalled_seconds + self.updates.stalled_seconds

    @contextmanager
    def step(self) -> Iterator[None]:
        """Context for a training step, which is done at the end of the context."""
        begin, waited = self._clock(), self._waited
        self._activity = "computing"
        self.working("a step")
        yield
        self._busy.append(self._clock() - begin - (self._waited - waited))
        self._busy_seconds = sum(self._busy) / len(self._busy)
        self.step_done(self._step + 1)
        self.working("between steps")

    def step_done(self, step: int) -> None:
        """Set the step that the job has reached, by training or by a checkpoint. The next record reports it."""
        self._step = step

    def save_begun(self) -> None:
        self._save_began = self._clock()
        self.working("begins to save")

    def save_done(self) -> None:
        """Report that the checkpoint is committed. Called by the checkpoint thread."""
        if self._file is not None:
            self._file.write_saved(self._clock())

    def ended(self) -> None:
        self._activity = "ended"
        self.working("")

    def _wait_for(self, future: Future[_T], thread: SideThread, begin: float) -> None:
        waited = thread.waited_seconds()
        self._look_at(thread, begin)
        try:
            while wait([future], _LOOK_SECONDS).not_done:
                self.failure.check()
                self._look_at(thread, begin)
        finally:
            self._works_again(thread.waited_seconds() - waited)

    def _look_at(self, thread: SideThread, begin: float) -> None:
        waits_for, since = thread.waits_for()
        activity: Activity = self._activity if waits_for is None else "waiting"
        self._beat(activity, waits_for or thread.work, max(since, begin))

    def _works_again(self, waited: float) -> None:
        """Report the end of a wait. `waited`: seconds of the wait that were spent on other ranks."""
        self._waited += waited
        self._waits += 1
        self.working(self._doing)

    def _beat(self, activity: Activity, doing: str, since: float) -> None:
        if self._file is not None:
            self._file.write(activity, doing, since, self._step, self._waits, self._busy_seconds, self._save_began)

"""Computations on what tenants wrote, in a thread beside the event loop, each with a limit on its processor time.

Reading a spec and planning are pure functions of a few milliseconds. One that took for ever in the event loop would end
the renewal of the Lease, the reports and the passes over all other jobs; here it is ended itself.

CPython raises an exception in another thread between two of its instructions, which ends whatever is written in Python.
A call into C that did not come back would keep the interpreter's lock: what C does on behalf of tenants, such as JSON
and patterns, has bounds where it is read.
"""

import asyncio
import ctypes
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

COMPUTE_SECONDS = 0.5
"""Most seconds of the processor for one computation; tests hold plans to a tenth of it."""
_LOOK_SECONDS = 0.05
"""Seconds between two looks at the time that a computation has taken."""
_FIRST_WAIT, _LONGEST_WAIT = 60.0, 3600.0
_MOST_JOBS = 1000


class Overran(Exception):
    """A computation took longer than it may, and was ended."""


class _End(BaseException):
    """Raised in a thread to end it; nothing that catches errors catches it."""


class Computer:
    """One computation at a time, in the order in which they are asked for."""

    def __init__(self, seconds: float = COMPUTE_SECONDS) -> None:
        self._seconds = seconds
        self._turn = asyncio.Lock()
        self._thread: _Thread | None = None

    async def run(self, function: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        """Return what the function returns, or raise what it raises. Raises Overran.

        The function must not touch what the event loop changes.
        """
        async with self._turn:
            thread = self._thread = self._thread or _Thread()
            answer = thread.compute(partial(function, *arguments, **named))
            try:
                await self._watch(thread, answer)
            finally:
                if not answer.done():
                    self._thread = None
                    thread.end()
        result: T = answer.result()
        return result

    async def _watch(self, thread: "_Thread", answer: "asyncio.Future[Any]") -> None:
        """Waits for the answer. Raises Overran."""
        begin = thread.seconds
        while True:
            await asyncio.wait([answer], timeout=_LOOK_SECONDS)
            if answer.done():
                return
            # Time of the processor, not of the clock: a machine that is busy elsewhere is no fault of the job.
            if thread.seconds - begin > self._seconds:
                raise Overran(f"it took more than {self._seconds:g} s of processor time, and was ended")


class _Thread:
    """A thread that computes until it is ended."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._tasks: SimpleQueue[tuple[Callable[[], Any], asyncio.Future[Any]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="computing", daemon=True)
        self._thread.start()
        assert self._thread.ident is not None, "it is started"
        self._ident = self._thread.ident
        self._clock = time.pthread_getcpuclockid(self._ident)

    @property
    def seconds(self) -> float:
        """Processor time that the thread has taken."""
        return time.clock_gettime(self._clock)

    def compute(self, function: Callable[[], Any]) -> "asyncio.Future[Any]":
        answer = self._loop.create_future()
        self._tasks.put((function, answer))
        return answer

    def end(self) -> None:
        """Ends the thread, whatever it does, as soon as it does something in Python."""
        self._tasks.put(None)
        self._interrupt()

    def _interrupt(self) -> None:
        if self._thread.is_alive():
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._ident), ctypes.py_object(_End))
            # Once more, in case that code was about to leave a block that catches everything.
            self._loop.call_later(_LOOK_SECONDS, self._interrupt)

    def _serve(self) -> None:
        # The loop may be closed before a last answer is given.
        with suppress(_End, RuntimeError):
            while (task := self._tasks.get()) is not None:
                function, answer = task
                try:
                    result = function()
                except Exception as error:
                    self._loop.call_soon_threadsafe(_answer, answer, None, error)
                else:
                    self._loop.call_soon_threadsafe(_answer, answer, result, None)
                del task, function, answer


def _answer(answer: "asyncio.Future[Any]", result: Any, error: Exception | None) -> None:
    if answer.done():
        return  # nobody waits for it any more
    if error is None:
        answer.set_result(result)
    else:
        answer.set_exception(error)


@dataclass(frozen=True)
class _Overrun:
    generation: int
    times: int
    until: float
    """The moment, by the monotonic clock, before which the job is left alone."""


class LeftAlone:
    """Jobs whose last computation overran, by their uids; the newest of them.

    A job is left alone until its spec changes, or for a time that doubles up to an hour: what made it expensive may be
    its pods, which come and go.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known: dict[str, _Overrun] = {}

    def wait(self, uid: str, generation: int) -> float | None:
        """Seconds for which the job is still left alone; None where it is not."""
        known = self._known.get(uid)
        if known is None or known.generation != generation or known.until <= self._clock():
            return None
        return known.until - self._clock()

    def note(self, uid: str, generation: int) -> float:
        """Takes an overrun. Returns the seconds for which the job is left alone now."""
        known = self._known.pop(uid, None)
        times = known.times + 1 if known and known.generation == generation else 0
        wait = min(_FIRST_WAIT * 2.0**times, _LONGEST_WAIT)
        self._known[uid] = _Overrun(generation, times, self._clock() + wait)
        while len(self._known) > _MOST_JOBS:
            del self._known[next(iter(self._known))]
        return wait

    def forget(self, uid: str) -> None:
        self._known.pop(uid, None)

"""Planning thread: parses and plans tenants' input beside the event loop, with a limit on the CPU time of each
computation. Also the backoff of jobs over the limit, and the cache of parsed specs.

Parsing a spec and planning are pure functions of a few milliseconds. If one of them ran forever in the event loop, it
would stop the renewal of the Lease, the reports and the passes over all other jobs; here it is aborted.

CPython raises an exception in another thread between two instructions, which aborts any code written in Python. A call
into C that never returned would hold the interpreter lock, so the input of C code that works for tenants, such as JSON
and regular expressions, is bounded where it is read.
"""

import asyncio
import ctypes
import gc
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any, ParamSpec, TypeVar

from pseudoreal_api.spec.job import JobMetadata, PseudoRealJob, PseudoRealJobSpec

Json = dict[str, Any]
P = ParamSpec("P")
T = TypeVar("T")

PLANNING_SECONDS = 0.5
"""Maximum CPU seconds of one computation; tests limit plans to a tenth of it."""
_CHECK_SECONDS = 0.05
"""Seconds between two checks of a computation's CPU time."""
_FIRST_WAIT, _LONGEST_WAIT = 60.0, 3600.0
"""Seconds for which a job is left alone after its computation overran: first and maximum."""
_MOST_JOBS = 1000
SPEC_CACHE_BYTES = 2**21
"""Maximum total size of the cached specs, in bytes of JSON; in memory they take about twelve times as much."""
_Key = tuple[str, int, str | None, str | None]


class Overran(Exception):
    """A computation exceeded its CPU time and was aborted. The name of this class is part of a condition's message
    (`internal_error.reason_and_message`)."""


class _End(BaseException):
    """Raised in a thread to end it. A BaseException, so that handlers of errors do not catch it."""


class PlanningThread:
    """Runs one computation at a time, in the order of the calls."""

    def __init__(self, seconds: float = PLANNING_SECONDS) -> None:
        self._seconds = seconds
        self._lock = asyncio.Lock()
        self._thread: _WorkerThread | None = None

    async def run(self, function: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        """Return the result of the function, or raise its error. Raises Overran.

        The function must not touch objects that the event loop changes.
        """
        async with self._lock:
            thread = self._thread = self._thread or _WorkerThread()
            answer = thread.submit(partial(function, *arguments, **named))
            try:
                await self._wait_within_limit(thread, answer)
            finally:
                # Cancelled, or overrun: the thread may compute forever, so the next call gets a new thread.
                if not answer.done():
                    self._thread = None
                    thread.end()
        result: T = answer.result()
        return result

    async def _wait_within_limit(self, thread: "_WorkerThread", answer: "asyncio.Future[Any]") -> None:
        """Wait for the answer. Raises Overran."""
        begin, collections, was_extended = thread.seconds, _full_collections(), False
        while True:
            await asyncio.wait([answer], timeout=_CHECK_SECONDS)
            if answer.done():
                return
            # CPU time, not wall-clock time: a machine that is busy with other work is not the job's fault.
            if thread.seconds - begin <= self._seconds:
                continue
            # A full garbage collection is not the job's fault either: it visits the objects of all jobs, in any thread
            # that allocates. The limit then counts anew, once, so that garbage cannot keep a computation alive.
            if _full_collections() > collections and not was_extended:
                begin, was_extended = thread.seconds, True
            else:
                raise Overran(f"it took more than {self._seconds:g} s of processor time, and was ended")


def _full_collections() -> int:
    """Return the number of garbage collections of the oldest generation since the process started."""
    return int(gc.get_stats()[-1]["collections"])


class _WorkerThread:
    """A thread that runs computations until it is ended."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._tasks: SimpleQueue[tuple[Callable[[], Any], asyncio.Future[Any]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="planning", daemon=True)
        self._thread.start()
        assert self._thread.ident is not None, "a started thread has an ident"
        self._ident = self._thread.ident
        self._clock = time.pthread_getcpuclockid(self._ident)

    @property
    def seconds(self) -> float:
        """CPU time of the thread, in seconds."""
        return time.clock_gettime(self._clock)

    def submit(self, function: Callable[[], Any]) -> "asyncio.Future[Any]":
        answer = self._loop.create_future()
        self._tasks.put((function, answer))
        return answer

    def end(self) -> None:
        """End the thread at its next Python instruction, even in the middle of a computation."""
        self._tasks.put(None)
        self._interrupt()

    def _interrupt(self) -> None:
        if self._thread.is_alive():
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._ident), ctypes.py_object(_End))
            # Raise it again, in case the code was about to leave a block that catches everything.
            self._loop.call_later(_CHECK_SECONDS, self._interrupt)

    def _run(self) -> None:
        # RuntimeError: the loop may be closed before the last answer is delivered.
        with suppress(_End, RuntimeError):
            while (task := self._tasks.get()) is not None:
                function, answer = task
                try:
                    result = function()
                except Exception as error:
                    self._loop.call_soon_threadsafe(_resolve, answer, None, error)
                else:
                    self._loop.call_soon_threadsafe(_resolve, answer, result, None)
                del task, function, answer


def _resolve(answer: "asyncio.Future[Any]", result: Any, error: Exception | None) -> None:
    if answer.done():
        return  # the caller does not wait any more
    if error is None:
        answer.set_result(result)
    else:
        answer.set_exception(error)


@dataclass(frozen=True)
class _Overrun:
    generation: int
    times: int
    until: float
    """Time of the monotonic clock until which the job is left alone."""


class OverrunBackoff:
    """Backoff of jobs with a computation that overran; only the newest _MOST_JOBS of these jobs are kept.

    A job is left alone until its spec changes, or for a time that doubles up to an hour: the cost may come from its
    pods, which change as well.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._overruns: dict[str, _Overrun] = {}

    def remaining(self, uid: str, generation: int) -> float | None:
        """Return the seconds for which the job is still left alone; None if a computation may run now."""
        known = self._overruns.get(uid)
        if known is None or known.generation != generation or known.until <= self._clock():
            return None
        return known.until - self._clock()

    def record(self, uid: str, generation: int) -> float:
        """Record an overrun; return the seconds for which the job is left alone now."""
        known = self._overruns.pop(uid, None)
        times = known.times + 1 if known and known.generation == generation else 0
        wait = min(_FIRST_WAIT * 2.0**times, _LONGEST_WAIT)
        self._overruns[uid] = _Overrun(generation, times, self._clock() + wait)
        while len(self._overruns) > _MOST_JOBS:
            del self._overruns[next(iter(self._overruns))]
        return wait

    def forget(self, uid: str) -> None:
        self._overruns.pop(uid, None)


class SpecCache:
    """The most recently used specs. The key has the job's uid and generation, and the labels for queue and priority,
    because a change of labels leaves the generation as it is."""

    def __init__(self, most_bytes: int = SPEC_CACHE_BYTES) -> None:
        self._most = most_bytes
        self._specs: dict[_Key, tuple[PseudoRealJobSpec, int]] = {}
        self._bytes = 0

    def parse(self, body: Json) -> PseudoRealJob:
        """Return the job parsed from an object of the API server. Raises ValidationError."""
        metadata = JobMetadata.model_validate(body["metadata"])
        key = (metadata.uid, metadata.generation, metadata.queue, metadata.queue_priority)
        if known := self._specs.pop(key, None):
            self._specs[key] = known
            return PseudoRealJob(metadata=metadata, spec=known[0])
        job = PseudoRealJob.from_object(body)
        self._store(key, job.spec)
        return job

    def _store(self, key: _Key, spec: PseudoRealJobSpec) -> None:
        size = len(spec.to_json())
        if size > self._most:
            return
        self._specs[key], self._bytes = (spec, size), self._bytes + size
        while self._bytes > self._most:
            _, dropped = self._specs.pop(next(iter(self._specs)))
            self._bytes -= dropped

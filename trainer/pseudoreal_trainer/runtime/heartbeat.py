"""Heartbeat of a rank: the rank's main thread reports the start and the end of each wait for other ranks.

Only the main thread reports: a separate reporting thread would hide a stuck main thread.

The heartbeat is a file of a fixed layout, mapped into memory, so that writing a record costs a microsecond or two. Two
copies of the record are written in turn, each with its own checksum. If one copy is being written, or its writer was
stopped in the middle, a reader finds the other copy. The end of a save has a separate place in the file, because the
checkpoint thread writes it.
"""

import mmap
import re
import struct
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from math import isnan, nan
from pathlib import Path
from typing import Any, TypeVar, get_args
from zlib import crc32

from pseudoreal_api.wire.reports import Activity

from pseudoreal_trainer.runtime.first_failure import FirstFailure

Clock = Callable[[], float]
"""A clock, in seconds from any fixed moment."""


@dataclass(frozen=True, slots=True)
class _State:
    """State of a thread. Another thread reads the state, so a change replaces the whole object."""

    waits_for: "str | SideThread | None"
    """Target of the wait: a description of other ranks, or another thread of this rank. None: the thread works."""
    since: float
    waited: float
    """Total seconds of waiting for other ranks, until `since`."""
    other_waited: float = 0.0
    """Value of `waited_seconds` of the awaited thread at `since`; 0 while no other thread is awaited."""


class SideThread:
    """State of a thread other than the main thread. The thread itself enters `waiting` and `waiting_behind`; any thread
    may call `waited_seconds` and `waits_for`."""

    def __init__(self, work: str, clock: Clock = time.monotonic) -> None:
        """`work`: description of the thread's work."""
        self.work, self._clock = work, clock
        self._state = _State(None, clock(), 0.0)
        self.stalled_seconds = 0.0
        """Total seconds for which the main thread has waited for this thread. Written only by the main thread."""

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Count the time in the context as a wait of this thread for other ranks."""
        self._state = _State(what, self._clock(), self._state.waited)
        try:
            yield
        finally:
            self._works()

    @contextmanager
    def waiting_behind(self, other: "SideThread") -> Iterator[None]:
        """Count the time in the context as a wait for another thread of this rank. The time counts as a wait for other
        ranks while `other` waits for other ranks."""
        self._state = _State(other, self._clock(), self._state.waited, other.waited_seconds())
        try:
            yield
        finally:
            self._works()

    def waited_seconds(self) -> float:
        """Return the total seconds of waiting for other ranks."""
        state = self._state
        if isinstance(state.waits_for, SideThread):
            return state.waited + state.waits_for.waited_seconds() - state.other_waited
        return state.waited + (0.0 if state.waits_for is None else self._clock() - state.since)

    def waits_for(self) -> tuple[str | None, float]:
        """Return the description of the wait for other ranks, and the start of the wait. If the thread works: None, and
        the start of the work."""
        state = self._state
        if isinstance(state.waits_for, SideThread):
            what, since = state.waits_for.waits_for()
            return what, max(since, state.since)
        return state.waits_for, state.since

    def _works(self) -> None:
        self._state = _State(None, self._clock(), self.waited_seconds())


_ACTIVITIES: tuple[Activity, ...] = get_args(Activity)
_INDEX = {activity: index for index, activity in enumerate(_ACTIVITIES)}
_RECORD = struct.Struct("<QIIB64sdQdd")
"""Layout of a record: number, pid, rank, activity, doing, since, step, busy seconds, start of the save."""
_PROCESSES = Path("/proc")
_GONE = "X"
_SAVED = struct.Struct("<d")
_CHECKSUM = struct.Struct("<I")
_RECORD_BYTES, _SAVED_BEGIN, _FILE_BYTES = 128, 256, 272
assert _RECORD.size + _CHECKSUM.size <= _RECORD_BYTES


@dataclass(frozen=True, slots=True)
class HeartbeatRecord:
    """Record of a rank's heartbeat. Times are in seconds of CLOCK_MONOTONIC, the same clock in all processes of a
    machine."""

    pid: int
    rank: int
    activity: Activity
    doing: str
    since: float
    """Start of the current `activity` with the current `doing`."""
    step: int
    """Training steps done since the job's start."""
    busy_seconds: float | None
    """Mean seconds of the newest steps, excluding waits for other ranks; None before the end of the first step."""
    save_began: float | None
    """Time at which the save in progress started; None: no save is in progress."""


class HeartbeatFile:
    """Writer of the heartbeat file. One thread calls `write`, and one thread calls `write_saved`."""

    def __init__(self, path: Path, pid: int, rank: int) -> None:
        with path.open("wb+") as file:
            # Without memory for a page of the mapping, a write to the page would end the process (SIGBUS). To write
            # zeros allocates the page on every system; posix_fallocate is Linux's.
            file.write(bytes(_FILE_BYTES))
            file.flush()
            self._map = mmap.mmap(file.fileno(), _FILE_BYTES)
        self._pid, self._rank, self._number = pid, rank, 0

    def write(
        self,
        activity: Activity,
        doing: str,
        since: float,
        step: int,
        busy_seconds: float,
        save_began: float,
    ) -> None:
        """Write a record. `doing`: cut off after 64 bytes. `busy_seconds`, `save_began`: NaN for none."""
        self._number += 1
        numbers = (since, step, busy_seconds, save_began)
        body = _RECORD.pack(self._number, self._pid, self._rank, _INDEX[activity], doing.encode(), *numbers)
        self._put(self._number % 2 * _RECORD_BYTES, body)

    def write_saved(self, moment: float) -> None:
        """Record the commit of the save in progress. `moment`: time of the commit."""
        self._put(_SAVED_BEGIN, _SAVED.pack(moment))

    def _put(self, begin: int, body: bytes) -> None:
        self._map[begin : begin + len(body) + _CHECKSUM.size] = body + _CHECKSUM.pack(crc32(body))


def read_heartbeat(path: Path) -> HeartbeatRecord | None:
    """Return the newest record; None if the file is missing or holds no complete record. Any process may call this at
    any time."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    found = [record for record in (_sound(content, _RECORD, copy * _RECORD_BYTES) for copy in range(2)) if record]
    if not found:
        return None
    _, pid, rank, activity, doing, since, step, busy, began = max(found)
    saved = _sound(content, _SAVED, _SAVED_BEGIN)
    return HeartbeatRecord(
        pid=pid,
        rank=rank,
        activity=_ACTIVITIES[activity],
        doing=doing.rstrip(b"\0").decode(errors="replace"),
        since=since,
        step=step,
        busy_seconds=None if isnan(busy) else busy,
        save_began=None if isnan(began) or (saved and saved[0] >= began) else began,
    )


def _sound(content: bytes, layout: struct.Struct, begin: int) -> tuple[Any, ...] | None:
    """Return the values at `begin`; None if their checksum does not match."""
    body = content[begin : begin + layout.size]
    checksum = content[begin + layout.size : begin + layout.size + _CHECKSUM.size]
    is_sound = len(checksum) == _CHECKSUM.size and _CHECKSUM.unpack(checksum)[0] == crc32(body)
    return layout.unpack(body) if is_sound else None


_T = TypeVar("_T")
_LOOK_SECONDS = 1.0
"""Interval in seconds at which the main thread checks the thread that it waits for."""
_STEPS = 10
"""Number of training steps over which the busy time is averaged."""


def process_state(pid: int) -> str:
    """Return the state letter of a process from /proc/PID/stat, see proc_pid_stat(5); X if the process does not
    exist. A system without /proc is asked by ps, whose letters for stopped (T) and dead (Z) are the same."""
    if not _PROCESSES.is_dir():
        return _state_of_ps(pid)
    try:
        # The process name comes first, in brackets, and may itself contain brackets: search from the end.
        stat = (_PROCESSES / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
        found = re.search(r"\) (\S)[^)]*$", stat)
    except (FileNotFoundError, ProcessLookupError):
        return _GONE
    return found[1] if found else ""


def _state_of_ps(pid: int) -> str:
    try:
        shown = subprocess.run(["/bin/ps", "-o", "state=", "-p", str(pid)], stdout=subprocess.PIPE, text=True)
    except OSError:  # no ps: unknown, which counts as alive
        return ""
    return shown.stdout.strip()[:1] or _GONE


class Heartbeat:
    """Heartbeat of a rank. Main thread only, except for `save_done`. Descriptions of waits and of work are cut off
    after 64 bytes."""

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
        self._step = 0
        self._waited = 0.0
        self._busy: deque[float] = deque(maxlen=_STEPS)
        self._busy_seconds = self._save_began = nan
        self.working("")

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Report, during the context, that the main thread waits for other ranks."""
        begin = self._clock()
        self._beat("waiting", what, begin)
        try:
            yield
        finally:
            self._works_again(self._clock() - begin)

    def working(self, what: str) -> None:
        """Report that the main thread works. `what`: description of the work."""
        self._doing = what
        self._beat(self._activity, what, self._clock())

    def join(self, future: Future[_T], thread: SideThread) -> _T:
        """Wait for the result of another thread of this rank and return it.

        The rank counts as waiting only while the other thread waits for other ranks. Raises the first failure of any
        thread: after a failure, the result may never come.
        """
        if not future.done():
            begin = self._clock()
            self._wait_for(future, thread, begin)
            thread.stalled_seconds += self._clock() - begin
        self.failure.check()
        return future.result()

    @property
    def stalled_seconds(self) -> float:
        """Total seconds for which the main thread has waited for the reduction and update threads."""
        return self.reductions.stalled_seconds + self.updates.stalled_seconds

    @contextmanager
    def step(self) -> Iterator[None]:
        """Report and time a training step. At the end of the context, the step is done."""
        begin, waited = self._clock(), self._waited
        self._activity = "computing"
        self.working("a step")
        yield
        self._busy.append(self._clock() - begin - (self._waited - waited))
        self._busy_seconds = sum(self._busy) / len(self._busy)
        self.step_done(self._step + 1)
        self.working("between steps")

    def step_done(self, step: int) -> None:
        """Set the step that the job has reached, by training or by loading a checkpoint. Only the next record of the
        heartbeat contains the step."""
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
        self.working(self._doing)

    def _beat(self, activity: Activity, doing: str, since: float) -> None:
        if self._file is not None:
            self._file.write(activity, doing, since, self._step, self._busy_seconds, self._save_began)

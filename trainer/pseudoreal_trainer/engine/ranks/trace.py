"""Real timeline of a rank as Chrome trace events (chrome://tracing, Perfetto), and the bytes that it moved."""

import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pseudoreal_trainer.engine.ranks.streams import Streams, synchronize
from pseudoreal_trainer.plan.effects import Traffic
from pseudoreal_trainer.plan.records import Record

_STEPS = 50
"""Number of training steps in a file: enough to look at, and few enough to load."""


@dataclass(frozen=True)
class _Executed:
    """Kernels that a GPU executes between two CUDA events."""

    lane: str
    done: Record
    step: int
    begin: Any
    end: Any


class Trace:
    """Trace of one rank. Threads may write to it at the same time."""

    def __init__(self, rank: int, folder: Path | None = None) -> None:
        """`folder`: where the file of the first steps is written. None: there is no file, and no event is kept."""
        self.rank, self._folder = rank, folder
        self.events: list[dict[str, Any]] = []
        self.records = folder is not None
        """Whether events are kept; bytes are always counted."""
        self.moved: Counter[Traffic] = Counter()
        """Bytes that this rank has moved since the last `begin`."""
        # The main thread, the update thread, and the disk and checkpoint threads count copies. Without the lock two of
        # them could read the same sum, and one count would be lost.
        self._counting = threading.Lock()
        self._step, self._steps = 0, 0
        self._under_way: list[_Executed] = []
        """Kernels that the GPU had not yet finished at the last query."""
        self._zero: tuple[Any, int] | None = None
        """CUDA event, and its time in nanoseconds of time.perf_counter_ns."""

    def begin(self, step: int) -> None:
        """Start the trace of a step: reset the byte counters, and write the file after the first steps."""
        self._resolve()
        with self._counting:
            self._step, self.moved = step, Counter()
        self._steps += 1
        if self._folder is not None and self._steps > _STEPS:
            self.close()

    def close(self) -> None:
        """Write the file, unless it was written."""
        if self._folder is not None and self.records:
            self._resolve()
            self._folder.mkdir(parents=True, exist_ok=True)
            name = {"name": "process_name", "ph": "M", "pid": self.rank, "args": {"name": f"rank {self.rank}"}}
            content = {"traceEvents": [name, *list(self.events)], "displayTimeUnit": "ms"}
            (self._folder / f"rank-{self.rank:04d}.trace.json").write_text(json.dumps(content))
            self.records = False

    @contextmanager
    def span(self, lane: str, done: Record | None, name: str = "", **facts: Any) -> Iterator[None]:
        """Record the time of the context on a lane of the trace. `done`: plan record that the time belongs to."""
        begin = time.perf_counter_ns()
        try:
            yield
        finally:
            self.add(lane, begin, done, name, **facts)

    @contextmanager
    def executed(self, lane: str, done: Record, streams: Streams) -> Iterator[None]:
        """Record the time in which the GPU executes the kernels launched in the context on the current stream."""
        if not (self.records and streams.are_real):
            with self.span(lane, done):
                yield
            return
        if self._zero is None:
            zero = streams.record_timed_event()
            synchronize(zero)
            self._zero = zero, time.perf_counter_ns()
        begin = streams.record_timed_event()
        yield
        self._under_way.append(_Executed(lane, done, self._step, begin, streams.record_timed_event()))

    def _resolve(self) -> None:
        """Record the kernels that the GPU has finished. Waits for nothing, so that a failed rank can end at once."""
        left = []
        for executed in self._under_way:
            if executed.end.query():
                begin, end = (self._moment(event) for event in (executed.begin, executed.end))
                self._note(executed.lane, (begin, end), executed.done, executed.step)
            else:
                left.append(executed)
        self._under_way = left

    def _moment(self, event: Any) -> int:
        assert self._zero is not None, "`_zero` is recorded before the first of these events"
        zero, at = self._zero
        return at + int(zero.elapsed_time(event) * 1e6)

    def add(self, lane: str, begin: int, done: Record | None, name: str = "", **facts: Any) -> None:
        """Record the time from `begin`, in nanoseconds of time.perf_counter_ns, until now."""
        if self.records:
            self._note(lane, (begin, time.perf_counter_ns()), done, self._step, name, **facts)

    def _note(
        self, lane: str, span: tuple[int, int], done: Record | None, step: int, name: str = "", **facts: Any
    ) -> None:
        if done is not None:
            name = name or type(done).__name__
            facts |= {key: _plain(getattr(done, key)) for key in done.__slots__}
        begin, end = span
        self.events.append(
            {
                "name": name,
                "ph": "X",
                "ts": begin / 1000,
                "dur": (end - begin) / 1000,
                "pid": self.rank,
                "tid": lane,
                "args": {"step": step, **facts},
            }
        )

    def move(self, traffic: Traffic, size: int) -> None:
        """Count bytes that this rank moves."""
        with self._counting:
            self.moved[traffic] += size


def _plain(value: Any) -> Any:
    return getattr(value, "value", value)

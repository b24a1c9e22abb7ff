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
"""Number of training steps in the trace file: enough to compare steps, and few enough for a viewer to load."""


@dataclass(frozen=True)
class _Executed:
    """Kernels that a GPU executes between two CUDA events."""

    lane: str
    record: Record
    step: int
    begin: Any
    end: Any


class Trace:
    """Trace of one rank. Threads may write to it at the same time."""

    def __init__(self, rank: int, folder: Path | None = None) -> None:
        """`folder`: directory for the file of the first steps. None: no file is written, and no event is kept."""
        self.rank, self._folder = rank, folder
        self.events: list[dict[str, Any]] = []
        self.is_recording = folder is not None
        """Whether events are kept; bytes are always counted."""
        self.moved: Counter[Traffic] = Counter()
        """Bytes that this rank has moved since the last `begin_step`."""
        # The main thread, the reduction thread, and the threads of disks and snapshots count bytes. Without the lock,
        # two threads could read the same sum, and one count would be lost.
        self._counting = threading.Lock()
        self._step, self._steps = 0, 0
        self._pending: list[_Executed] = []
        """Kernels that the GPU had not yet finished at the last query."""
        self._zero: tuple[Any, int] | None = None
        """Reference for GPU times: (CUDA event, time of the event in nanoseconds of time.perf_counter_ns); None before
        the first GPU span."""

    def begin_step(self, step: int) -> None:
        """Start the trace of a step: reset the byte counters, and write the file after the first steps."""
        self._append_finished()
        with self._counting:
            self._step, self.moved = step, Counter()
        self._steps += 1
        if self._folder is not None and self._steps > _STEPS:
            self.close()

    def close(self) -> None:
        """Write the file, unless it was written."""
        if self._folder is not None and self.is_recording:
            self._append_finished()
            self._folder.mkdir(parents=True, exist_ok=True)
            name = {"name": "process_name", "ph": "M", "pid": self.rank, "args": {"name": f"rank {self.rank}"}}
            content = {"traceEvents": [name, *list(self.events)], "displayTimeUnit": "ms"}
            (self._folder / f"rank-{self.rank:04d}.trace.json").write_text(json.dumps(content), encoding="utf-8")
            self.is_recording = False

    @contextmanager
    def span(self, lane: str, record: Record | None, name: str = "", **facts: Any) -> Iterator[None]:
        """Record the time of the context on a track (`lane`) of the trace. `record`: plan record that the time belongs
        to."""
        begin = time.perf_counter_ns()
        try:
            yield
        finally:
            self.add(lane, begin, record, name, **facts)

    @contextmanager
    def gpu_span(self, lane: str, record: Record, streams: Streams) -> Iterator[None]:
        """Record the time in which the GPU executes the kernels launched in the context on the current stream."""
        if not (self.is_recording and streams.are_real):
            with self.span(lane, record):
                yield
            return
        if self._zero is None:
            zero = streams.record_timed_event()
            synchronize(zero)
            self._zero = zero, time.perf_counter_ns()
        begin = streams.record_timed_event()
        yield
        self._pending.append(_Executed(lane, record, self._step, begin, streams.record_timed_event()))

    def _append_finished(self) -> None:
        """Record the kernels that the GPU has finished. Does not wait for other kernels, so that a failed rank can end
        at once."""
        left = []
        for executed in self._pending:
            if executed.end.query():
                begin, end = (self._moment(event) for event in (executed.begin, executed.end))
                self._append_event(executed.lane, (begin, end), executed.record, executed.step)
            else:
                left.append(executed)
        self._pending = left

    def _moment(self, event: Any) -> int:
        assert self._zero is not None, "`_zero` is recorded before the first of these events"
        zero, at = self._zero
        return at + int(zero.elapsed_time(event) * 1e6)

    def add(self, lane: str, begin: int, record: Record | None, name: str = "", **facts: Any) -> None:
        """Record the time from `begin`, in nanoseconds of time.perf_counter_ns, until now."""
        if self.is_recording:
            self._append_event(lane, (begin, time.perf_counter_ns()), record, self._step, name, **facts)

    def _append_event(
        self, lane: str, span: tuple[int, int], record: Record | None, step: int, name: str = "", **facts: Any
    ) -> None:
        if record is not None:
            name = name or type(record).__name__
            facts |= {key: _plain(getattr(record, key)) for key in record.__slots__}
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

    def count_bytes(self, traffic: Traffic, size: int) -> None:
        """Add `size` bytes to the count of bytes moved by this kind of traffic."""
        with self._counting:
            self.moved[traffic] += size


def _plain(value: Any) -> Any:
    return getattr(value, "value", value)

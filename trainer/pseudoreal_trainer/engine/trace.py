"""What a rank really did and when, as Chrome trace events (chrome://tracing, Perfetto), and how much it moved."""

import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from pseudoreal_trainer.plan.steps import Step

Link = Literal["h2d", "d2h", "disk_read", "disk_write", "collective", "pipeline"]


_STEPS = 50
"""Steps that a file holds: enough to look at, and small enough to load."""


class Trace:
    """What one rank did. Threads may write to it at the same time."""

    def __init__(self, rank: int, folder: Path | None = None) -> None:
        """`folder`: for the file of the first steps. None: no file, and no events."""
        self.rank, self._folder = rank, folder
        self.events: list[dict[str, Any]] = []
        self.records = folder is not None
        """Whether events are kept; bytes always are counted."""
        self.moved: Counter[Link] = Counter()
        """Bytes, since the last `begin`."""
        # Copies are counted by the main thread, by that of updates and by those of disk and checkpoint: without the
        # lock two of them could read the same sum, and one would be lost.
        self._counting = threading.Lock()
        self._step, self._steps = 0, 0

    def begin(self, step: int) -> None:
        with self._counting:
            self._step, self.moved = step, Counter()
        self._steps += 1
        if self._folder is not None and self._steps > _STEPS:
            self.close()

    def close(self) -> None:
        """Writes the file."""
        if self._folder is not None and self.records:
            self._folder.mkdir(parents=True, exist_ok=True)
            name = {"name": "process_name", "ph": "M", "pid": self.rank, "args": {"name": f"rank {self.rank}"}}
            content = {"traceEvents": [name, *list(self.events)], "displayTimeUnit": "ms"}
            (self._folder / f"rank-{self.rank:04d}.trace.json").write_text(json.dumps(content))
            self.records = False

    @contextmanager
    def span(self, lane: str, done: Step | None, name: str = "", **facts: Any) -> Iterator[None]:
        """A stretch of time on a lane: a step of the plan, or something that belongs to one."""
        begin = time.perf_counter_ns()
        try:
            yield
        finally:
            self.add(lane, begin, done, name, **facts)

    def add(self, lane: str, begin: int, done: Step | None, name: str = "", **facts: Any) -> None:
        """From `begin`, in nanoseconds of time.perf_counter_ns, until now."""
        if not self.records:
            return
        if done is not None:
            name = name or type(done).__name__
            facts |= {key: _plain(getattr(done, key)) for key in done.__slots__}
        now = time.perf_counter_ns()
        self.events.append(
            {
                "name": name,
                "ph": "X",
                "ts": begin / 1000,
                "dur": (now - begin) / 1000,
                "pid": self.rank,
                "tid": lane,
                "args": {"step": self._step, **facts},
            }
        )

    def move(self, link: Link, size: int) -> None:
        """Counts bytes that this rank moves."""
        with self._counting:
            self.moved[link] += size


def _plain(value: Any) -> Any:
    return getattr(value, "value", value)

"""CUDA streams without a GPU: they do nothing, and record the order of calls."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import local
from typing import Any

import torch
from pseudoreal_trainer.engine.ranks.streams import Stream, Streams

COMPUTE = "compute"


@dataclass(frozen=True)
class RecordedEvent:
    """Replacement for a CUDA event."""

    stream: str
    number: int
    """Number of the event, and its time in milliseconds."""
    log: list[tuple[Any, ...]] = field(repr=False, compare=False)

    def query(self) -> bool:
        return ("synchronize", self) in self.log

    def elapsed_time(self, other: "RecordedEvent") -> float:
        return float(other.number - self.number)

    def synchronize(self) -> None:
        self.log.append(("synchronize", self))


class RecordedStreams(Streams):
    """Streams whose `log` has (call, event) for each recorded event, and for each wait for one."""

    def __init__(self, *, real: bool = False) -> None:
        """`real`: whether the streams claim to belong to a GPU."""
        super().__init__(torch.device("cpu"))
        self._real = real
        self.log: list[tuple[Any, ...]] = []
        self._present = local()
        self._events = 0

    @property
    def are_real(self) -> bool:
        return self._real

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self._present.stream = self.current, stream.value
        yield
        self._present.stream = before

    def record_event(self) -> Any:
        self._events += 1
        event = RecordedEvent(self.current, self._events, self.log)
        self.log.append(("record_event", event))
        return event

    def record_timed_event(self) -> Any:
        return self.record_event()

    def wait_event(self, event: Any) -> None:
        self.log.append(("wait_event", event))

    @property
    def current(self) -> str:
        """Name of the current stream of this thread."""
        return getattr(self._present, "stream", COMPUTE)

"""CUDA streams without a GPU: they do nothing, and record the order of calls."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import local
from typing import Any

import torch
from pseudoreal_trainer.engine.ranks.lanes import Lane, Lanes

COMPUTE = "compute"


@dataclass(frozen=True)
class Moment:
    """Replacement for a CUDA event."""

    lane: str
    number: int
    """Number of the event, and its time in milliseconds."""
    log: list[tuple[Any, ...]] = field(repr=False, compare=False)

    def query(self) -> bool:
        return ("reach", self) in self.log

    def elapsed_time(self, other: "Moment") -> float:
        return float(other.number - self.number)

    def synchronize(self) -> None:
        self.log.append(("reach", self))


class RecordedLanes(Lanes):
    """Streams whose `log` has (call, moment) for each recorded event, and for each wait for one."""

    def __init__(self, *, real: bool = False) -> None:
        """`real`: whether the streams claim to belong to a GPU."""
        super().__init__(torch.device("cpu"))
        self._real = real
        self.log: list[tuple[Any, ...]] = []
        self._present = local()
        self._marks = 0

    @property
    def are_real(self) -> bool:
        return self._real

    @contextmanager
    def on(self, lane: Lane) -> Iterator[None]:
        before, self._present.lane = self._lane, lane.value
        yield
        self._present.lane = before

    def mark(self) -> Any:
        self._marks += 1
        moment = Moment(self._lane, self._marks, self.log)
        self.log.append(("mark", moment))
        return moment

    def timed_mark(self) -> Any:
        return self.mark()

    def follow(self, mark: Any) -> None:
        self.log.append(("follow", mark))

    @property
    def _lane(self) -> str:
        return getattr(self._present, "lane", COMPUTE)

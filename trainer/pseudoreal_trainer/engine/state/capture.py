"""Snapshot of one step's state while training continues, through a buffer of fixed size.

One thread copies unit after unit into the buffer, as soon as the unit's update of that step is done; the unit's next
update waits for the copy. Another thread passes the content of the buffer to a sink. So training waits only while the
buffer is full.
"""

import queue
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import Tensor

from pseudoreal_trainer.engine.ranks.streams import Stream, Streams, Updated, synchronize
from pseudoreal_trainer.engine.ranks.trace import Trace
from pseudoreal_trainer.engine.state.memory import State
from pseudoreal_trainer.engine.state.ring import Ring
from pseudoreal_trainer.plan.memory.tiers import PORTION_BYTES
from pseudoreal_trainer.plan.units import KINDS, Kind


class Sink(Protocol):
    """Receiver of a snapshot."""

    def write(self, kind: Kind, content: Tensor) -> None:
        """Take the next elements, [n], whose memory is overwritten after the call. Units come in the order of the
        sources; within a unit, kind after kind."""


@dataclass(frozen=True)
class Source:
    """The part of a unit's state to be captured."""

    unit: int
    state: State
    begin: int
    """First element of the part, relative to the state's own vectors."""
    end: int
    updated: Updated
    """Newest update of the unit."""


@dataclass(frozen=True)
class _Portion:
    """A chunk of one vector of a unit, in the buffer."""

    kind: Kind
    content: Tensor
    """Elements of the chunk, a view of the buffer."""


class Capture:
    """One snapshot, with its two threads."""

    def __init__(self, sources: Sequence[Source], sink: Sink, ring: Ring, streams: Streams, trace: Trace) -> None:
        self._sources, self._sink, self._streams, self._trace = sources, sink, streams, trace
        self.captured: Mapping[int, Future[None]] = {source.unit: Future() for source in sources}
        """Unit -> future that completes when the unit's state may change."""
        self._ring = ring
        self._full: queue.SimpleQueue[_Portion | None] = queue.SimpleQueue()

    def start(self) -> Future[None]:
        """Start both threads. The returned future completes when the sink has everything, or raises the error of
        reading or writing."""
        threads = ThreadPoolExecutor(2, "capture", initializer=self._streams.enter_thread)
        taken, written = threads.submit(self._take_all), threads.submit(self._write_all)
        threads.shutdown(wait=False)
        return _both(taken, written)

    def _take_all(self) -> None:
        try:
            for source in self._sources:
                with self._trace.span("checkpoint", None, "capture", unit=source.unit):
                    self._take(source)
                self.captured[source.unit].set_result(None)
        except BaseException as error:
            for waited in self.captured.values():
                if not waited.done():
                    waited.set_exception(error)
            raise
        finally:
            self._full.put(None)

    def _take(self, source: Source) -> None:
        with self._streams.on(Stream.COPY_OUT):
            self._streams.wait_event(source.updated.result())
            count = min(PORTION_BYTES, self._ring.largest) // source.state.extent.master.itemsize
            for kind in KINDS:
                for begin in range(source.begin, source.end, count):
                    self._full.put(self._portion(source.state, kind, begin, min(begin + count, source.end)))

    def _portion(self, state: State, kind: Kind, begin: int, end: int) -> _Portion:
        dtype = state.extent.master
        content = self._ring.take((end - begin) * dtype.itemsize).view(dtype)
        self._copy(state.part(kind, begin, end), content)
        return _Portion(kind, content)

    def _copy(self, part: Tensor, content: Tensor) -> None:
        if part.device.type == "cpu":
            # NumPy copies in one thread: the other cores belong to training.
            np.copyto(content.numpy(), part.numpy())
        else:
            content.copy_(part, non_blocking=True)
            synchronize(self._streams.record_event())

    def _write_all(self) -> None:
        """Pass all chunks to the sink. After a failure of the sink, only give memory back: a full disk must not hold up
        training."""
        failure: BaseException | None = None
        while (portion := self._full.get()) is not None:
            if failure is None:
                failure = _failure_of(lambda p=portion: self._sink.write(p.kind, p.content))  # type: ignore[misc]
            self._ring.give_back()
        if failure is not None:
            raise failure


def _failure_of(act: Callable[[], None]) -> BaseException | None:
    try:
        act()
    except BaseException as error:
        return error
    return None


def _both(taken: Future[None], written: Future[None]) -> Future[None]:
    """Return a future that completes when both have, or when `taken` has failed: the sink of `written` may hang.
    `written` ends after `taken`."""
    done: Future[None] = Future()

    def taken_ends(_: Future[None]) -> None:
        if (error := taken.exception()) is not None:
            done.set_exception(error)

    def written_ends(_: Future[None]) -> None:
        if taken.exception() is not None:
            return
        if (error := written.exception()) is not None:
            done.set_exception(error)
        else:
            done.set_result(None)

    taken.add_done_callback(taken_ends)
    written.add_done_callback(written_ends)
    return done

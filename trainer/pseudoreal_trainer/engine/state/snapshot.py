"""Snapshot of one step's state while training continues, through a buffer of fixed size.

One thread copies unit after unit into the buffer, as soon as the unit's update of that step is done; the unit's next
update waits for the copy. Another thread passes the content of the buffer to a sink. So training waits only while the
buffer is full.
"""

import queue
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from pseudoreal_api.spec.optimizer import MOMENT_BLOCK as BLOCK
from torch import Tensor

from pseudoreal_trainer.engine.ranks.streams import Stream, Streams, Updated, synchronize
from pseudoreal_trainer.engine.ranks.trace import Trace
from pseudoreal_trainer.engine.state.blocks import BLOCKS, stored_length, unpacked
from pseudoreal_trainer.engine.state.memory import State
from pseudoreal_trainer.engine.state.pinned import Allocator, Block, PlainMemory
from pseudoreal_trainer.plan.memory.tiers import PORTION_BYTES, UNPACKED_ELEMENTS
from pseudoreal_trainer.plan.units import KINDS, Kind

ALIGNMENT = 8
"""Alignment of chunks in bytes; enough for elements of every dtype."""
_LEAST_BYTES = 64
"""Minimum bytes of a ring, for two blocks of moments."""


class Ring:
    """A ring buffer: one thread takes memory from it, another gives the memory back, oldest first."""

    def __init__(self, memory: Tensor) -> None:
        """`memory`: uint8, [size]. It holds at least two elements of the largest dtype, or two blocks of moments."""
        self._bytes = memory
        self._end = self._used = 0
        self._lengths: deque[int] = deque()
        """Bytes of each taken chunk, oldest first. If a chunk did not fit at the end of the buffer, the bytes left
        unused there are included."""
        self._changed = threading.Condition()

    @property
    def size(self) -> int:
        """Size in bytes."""
        return len(self._bytes)

    @property
    def largest(self) -> int:
        """Largest chunk in bytes: two such chunks always fit, wherever the first one lies."""
        return len(self._bytes) // 2 // ALIGNMENT * ALIGNMENT

    def take(self, size: int) -> Tensor:
        """Return memory for a chunk, [size] bytes, once it is free. `size` is at most `largest`."""
        # `_end` is read outside the lock, because only the thread that takes memory uses `_end`.
        capacity, length = len(self._bytes), _aligned(size)
        left_out = 0 if self._end + length <= capacity else capacity - self._end
        with self._changed:
            self._changed.wait_for(lambda: self._used + left_out + length <= capacity)
            begin = (self._end + left_out) % capacity
            self._end = begin + length
            self._used += left_out + length
            self._lengths.append(left_out + length)
        return self._bytes[begin : begin + size]

    def give_back(self) -> None:
        """Give back the oldest chunk."""
        with self._changed:
            self._used -= self._lengths.popleft()
            self._changed.notify()


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


class SnapshotRing:
    """Ring of a rank, kept from one checkpoint to the next: fresh memory costs more than the copies into it."""

    def __init__(self, memory: Allocator) -> None:
        """`memory`: allocator of host memory for copies to and from the device."""
        self._memory = memory
        self._block = Block(0, memory)
        self._ring: Ring | None = None

    def of_size(self, size: int, *, crosses_bus: bool) -> Ring:
        """Return a ring of at least `size` bytes. The ring of the previous call must not be used any more.

        `crosses_bus`: whether some of the data comes from the device. Data on the host needs no pinned memory. Call
        this between steps: pinning memory waits for all kernels of the device, and between steps no kernel waits for a
        message that depends on this rank's later calls.
        """
        if self._ring is None or self._ring.size < size:
            self.close()
            self._block = Block(max(size, _LEAST_BYTES), self._memory if crosses_bus else PlainMemory())
            self._ring = Ring(self._block.memory)
        return self._ring

    def close(self) -> None:
        self._block.close()


class Sink(Protocol):
    """Receiver of a snapshot."""

    def write(self, kind: Kind, content: Tensor) -> None:
        """Take the next elements, [n]. Their memory is overwritten after the call. Units come in the order of the
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
class _Chunk:
    """A chunk of one vector of a unit, in the buffer."""

    kind: Kind
    content: Tensor
    """Elements of the chunk as they are stored, a view of the buffer."""
    elements: int

    def read(self) -> Tensor:
        """Return the elements, [elements]; moments in blocks as bfloat16, in newly allocated memory."""
        is_packed = self.content.dtype == BLOCKS
        return unpacked(self.kind, self.content, self.elements) if is_packed else self.content


class Snapshot:
    """One snapshot, with its two threads."""

    def __init__(self, sources: Sequence[Source], sink: Sink, ring: Ring, streams: Streams, trace: Trace) -> None:
        self._sources, self._sink, self._streams, self._trace = sources, sink, streams, trace
        self.captured: Mapping[int, Future[None]] = {source.unit: Future() for source in sources}
        """Unit -> future that completes when the unit's state may change."""
        self._ring = ring
        self._chunks: queue.SimpleQueue[_Chunk | None] = queue.SimpleQueue()

    def start(self) -> Future[None]:
        """Start both threads. The returned future completes when the sink has everything, or raises the error of
        reading or writing."""
        threads = ThreadPoolExecutor(2, "capture", initializer=self._streams.enter_thread)
        taken, written = threads.submit(self._copy_all), threads.submit(self._write_all)
        threads.shutdown(wait=False)
        return _both(taken, written)

    def _copy_all(self) -> None:
        try:
            for source in self._sources:
                with self._trace.span("checkpoint", None, "capture", unit=source.unit):
                    self._copy_unit(source)
                self.captured[source.unit].set_result(None)
        except BaseException as error:
            for waited in self.captured.values():
                if not waited.done():
                    waited.set_exception(error)
            raise
        finally:
            self._chunks.put(None)

    def _copy_unit(self, source: Source) -> None:
        with self._streams.on(Stream.COPY_OUT):
            self._streams.wait_event(source.updated.result())
            for kind in KINDS:
                dtype = source.state.shard.dtype_of(kind)
                count = min(PORTION_BYTES, self._ring.largest) // dtype.itemsize
                if dtype == BLOCKS:
                    count = min(UNPACKED_ELEMENTS, count // stored_length(BLOCK, dtype) * BLOCK)
                first = max(source.begin, source.state.shard.first_of(kind))
                for begin in range(first, source.end, count):
                    self._chunks.put(self._copy_chunk(source.state, kind, begin, min(begin + count, source.end)))

    def _copy_chunk(self, state: State, kind: Kind, begin: int, end: int) -> _Chunk:
        dtype = state.shard.dtype_of(kind)
        content = self._ring.take(stored_length(end - begin, dtype) * dtype.itemsize).view(dtype)
        self._copy(state.part(kind, begin, end), content)
        return _Chunk(kind, content, end - begin)

    def _copy(self, part: Tensor, content: Tensor) -> None:
        if part.device.type == "cpu":
            # NumPy copies in one thread: the other cores belong to training.
            np.copyto(content.view(torch.uint8).numpy(), part.view(torch.uint8).numpy())
        else:
            content.copy_(part, non_blocking=True)
            synchronize(self._streams.record_event())

    def _write_all(self) -> None:
        """Pass all chunks to the sink. After a failure of the sink, only give memory back: a full disk must not hold up
        training."""
        failure: BaseException | None = None
        while (chunk := self._chunks.get()) is not None:
            if failure is None:
                failure = _failure(lambda p=chunk: self._sink.write(p.kind, p.read()))  # type: ignore[misc]
            self._ring.give_back()
        if failure is not None:
            raise failure


def _failure(write: Callable[[], None]) -> BaseException | None:
    try:
        write()
    except BaseException as error:
        return error
    return None


def _both(taken: Future[None], written: Future[None]) -> Future[None]:
    """Return a future that completes once both futures have completed. If `taken` fails, the future fails at once,
    because the sink of `written` may hang. `written` ends after `taken`."""
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

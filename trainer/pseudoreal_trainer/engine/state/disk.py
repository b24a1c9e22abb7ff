"""State of units on a disk: weights are read ahead, and units are updated chunk by chunk in buffers of fixed size."""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from pseudoreal_api.spec.optimizer import Optimizer as OptimizerSpec
from torch import Tensor

from pseudoreal_trainer.engine.ranks.streams import Event, synchronize
from pseudoreal_trainer.engine.ranks.trace import Trace
from pseudoreal_trainer.engine.state import blocks
from pseudoreal_trainer.engine.state.blocks import BLOCKS, stored_length
from pseudoreal_trainer.engine.state.direct_file import DirectFile, aligned_buffer
from pseudoreal_trainer.engine.state.memory import AdamW, Purpose, Shard, Slices, State
from pseudoreal_trainer.engine.state.pinned import BounceBuffers
from pseudoreal_trainer.plan.memory.pinned_arena import PAGE, PUT_ELEMENTS
from pseudoreal_trainer.plan.memory.tiers import CHUNK_ELEMENTS, CHUNKS_AT_A_TIME, PORTION_ROOM, aligned
from pseudoreal_trainer.plan.units import Kind, in_pages
from pseudoreal_trainer.plan.update_ranges import UpdateRange, cut, without
from pseudoreal_trainer.runtime.first_failure import FirstFailure

Section = Kind | Literal["compute", "gradient"]
_PURPOSES: dict[Section, Purpose] = {
    "weights": "weights",
    "compute": "weights",
    "first_moment": "moments",
    "second_moment": "moments",
    "gradient": "gradients",
}

_READ: tuple[Section, ...] = ("weights", "first_moment", "second_moment", "gradient")
_WRITTEN: tuple[Section, ...] = ("weights", "first_moment", "second_moment", "compute")
"""Sections that an update writes."""

CHUNK = CHUNK_ELEMENTS


@dataclass(frozen=True)
class _FileRange:
    """Range of the file that holds a section, or a chunk of a section."""

    offset: int
    length: int
    """Number of elements."""
    dtype: torch.dtype
    first: int = 0
    """Index of the first element in the unit's flat vector."""

    @property
    def size(self) -> int:
        """Size in bytes."""
        return self.bytes_before(self.length)

    def bytes_before(self, element: int) -> int:
        """Return the bytes of the first `element` elements of the range: whole blocks, or all elements."""
        return stored_length(element, self.dtype) * self.dtype.itemsize

    def chunk(self, elements: range) -> "_FileRange":
        """Return the range of some elements of the flat vector."""
        offset = self.offset + self.bytes_before(elements.start - self.first)
        return _FileRange(offset, len(elements), self.dtype, elements.start)

    def view(self, buffer: Tensor) -> Tensor:
        """Return the section's stored vector as a view of the first bytes of `buffer`."""
        return buffer[: self.size].view(self.dtype)


@dataclass(frozen=True)
class _UpdateArguments:
    """Arguments of an update that are the same for all chunks."""

    spec: OptimizerSpec
    rate: float
    scale: float
    idle: Sequence[range]


@dataclass(frozen=True)
class _Turn:
    """A part of an update: read a chunk of some sections, compute, write the chunk of others."""

    elements: range
    """Elements of the chunk: whole pages, or up to the end of the unit's flat vector."""
    reads: tuple[Section, ...]
    writes: tuple[Section, ...]
    compute: "Callable[[_Turn, dict[Section, Tensor]], None]"
    """Called with the turn, and section -> chunk, for what was read and for what is written."""

    def follows_write_of(self, other: "_Turn") -> bool:
        """Return whether this turn reads what the other writes."""
        first, second = self.elements, other.elements
        overlaps = first.start < second.stop and second.start < first.stop
        return overlaps and not set(self.reads).isdisjoint(other.writes)


@dataclass(frozen=True)
class DiskBuffers:
    """Host memory for units on disk, aligned for direct I/O."""

    passing: BounceBuffers
    """Bounce buffers, each for one gradient of a unit. The state is put into the file through them, too."""
    chunks: list[dict[Section, Tensor]]
    """One entry per chunk that may be in memory at the same time: section -> buffer for the chunk of this section."""


class Staging:
    """Buffers for weights in the compute dtype, on their way from disk to the device."""

    def __init__(self, buffers: Iterable[Tensor]) -> None:
        # (buffer, event after which the buffer is free), longest free first.
        self._free: deque[tuple[Tensor, Event]] = deque((buffer, None) for buffer in buffers)

    def take(self) -> Tensor:
        buffer, free = self._free.popleft()
        synchronize(free)
        return buffer

    def give_back(self, buffer: Tensor, event: Event) -> None:
        """Give a buffer back. `event`: event after which nothing reads the buffer."""
        self._free.append((buffer, event))


class Disk:
    """File of a rank's units on disk, with its threads and buffers."""

    def __init__(
        self,
        folder: Path,
        size: int,
        buffers: DiskBuffers,
        adamw: AdamW,
        trace: Trace,
        failure: FirstFailure | None = None,
        enter_thread: Callable[[], None] = lambda: None,
    ) -> None:
        """`failure`: record of the rank's first failure. `enter_thread`: called first in each thread."""
        self.failure = failure or FirstFailure()
        self.file, self.adamw, self.trace = DirectFile(folder, size, self.failure), adamw, trace
        # Three threads that wait for requests: one may read ahead while another reads a chunk and a third writes one.
        # They wait for events of the device.
        self.threads = ThreadPoolExecutor(3, "disk", initializer=enter_thread)
        self.passing, self.chunks = buffers.passing, buffers.chunks
        self._part_buffer = aligned_buffer(PORTION_ROOM)
        self._open = 0

    def read(self, pieces: Sequence[tuple[_FileRange, Tensor]]) -> list[Tensor]:
        """Read ranges of the file concurrently, each into its buffer. Return their vectors."""
        self._read([(file_range.offset, file_range.size, buffer) for file_range, buffer in pieces])
        return [file_range.view(buffer) for file_range, buffer in pieces]

    def _read(self, pieces: Sequence[tuple[int, int, Tensor]]) -> None:
        """Read (offset, size in bytes) of the file concurrently, each into its buffer."""
        with self.trace.span("disk", None, "read"):
            self.file.read([(offset, buffer[: aligned(size)]) for offset, size, buffer in pieces])
        self.trace.count_bytes("disk_read", sum(size for _, size, _ in pieces))

    def write(self, pieces: Sequence[tuple[_FileRange, Tensor]]) -> None:
        """Write ranges of the file concurrently, from buffers that hold their vectors."""
        with self.trace.span("disk", None, "write"):
            self.file.write([(file_range.offset, buffer[: aligned(file_range.size)]) for file_range, buffer in pieces])
        self.trace.count_bytes("disk_write", sum(file_range.size for file_range, _ in pieces))

    def read_part(self, file_range: _FileRange, begin: int, end: int) -> Tensor:
        """Return the elements begin..end-1 of a range, as they are stored. The result is valid until the next call.
        Call this from one thread only."""
        first, last = (file_range.bytes_before(index) for index in (begin, end))
        start = first // PAGE * PAGE
        size = last - start
        buffer = self._part_buffer if size <= len(self._part_buffer) else aligned_buffer(size)
        self._read([(file_range.offset + start, size, buffer)])
        return buffer[first - start : size].view(file_range.dtype)

    def open(self) -> None:
        self._open += 1

    def close(self) -> None:
        """Close the file once all states that use it have called this."""
        self._open -= 1
        if self._open == 0:
            self.threads.shutdown()
            self.file.close()


class DiskState(State):
    """State in a file on a disk. An update reads, computes and writes chunk after chunk, and reads the next chunk
    during the computation."""

    def __init__(self, shard: Shard, disk: Disk, file_ranges: Mapping[Section, _FileRange], staging: Staging) -> None:
        super().__init__(shard)
        self._disk, self._file_ranges, self._staging = disk, file_ranges, staging
        self._buffer: Tensor | None = None
        """Bounce buffer of the gradient, on its way to the update or to the disk."""
        self._reading: Future[tuple[Tensor, Tensor]] | None = None
        disk.open()

    def put(self, kind: Kind, values: Tensor) -> None:
        buffer = self._disk.passing.take()
        sections: tuple[Section, ...] = (kind, "compute") if kind == "weights" else (kind,)
        for section in sections:
            if (file_range := self._file_ranges.get(section)) is not None:
                for part in self._in_parts(file_range, buffer):
                    blocks.put(kind, values[part.first : part.first + part.length], part.view(buffer))
                    self._disk.write([(part, buffer)])
        self._disk.passing.give_back(buffer)

    def _in_parts(self, file_range: _FileRange, buffer: Tensor) -> Iterator[_FileRange]:
        """Yield the range in parts that fit in a bounce buffer, which may be smaller than a vector of master weights:
        it is as large as a gradient."""
        most = len(buffer) // self.shard.master.itemsize // PUT_ELEMENTS * PUT_ELEMENTS
        length = file_range.length if file_range.size <= len(buffer) else most
        assert length or not file_range.length, "a bounce buffer has room for PUT_ELEMENTS, or for the whole vector"
        for begin in range(0, file_range.length, max(1, length)):
            elements = range(begin, min(begin + length, file_range.length))
            yield file_range.chunk(range(elements.start + file_range.first, elements.stop + file_range.first))

    def part(self, kind: Kind, begin: int, end: int) -> Tensor:
        file_range = self._file_ranges[kind]
        return self._disk.read_part(file_range, begin - file_range.first, end - file_range.first)

    def read_ahead(self, after: Future[Any]) -> None:
        self._reading = self._disk.threads.submit(self._read_weights, after)

    def compute_weights(self) -> Tensor:
        assert self._reading is not None, "the plan reads a unit before it fetches the unit"
        return self._reading.result()[0]

    def are_weights_ready(self) -> bool:
        return self._reading is None or self._reading.done()

    def release_weights(self, event: Event) -> None:
        assert self._reading is not None, "the plan reads a unit before it fetches the unit"
        self._staging.give_back(self._reading.result()[1], event)
        self._reading = None

    def keep_gradient(self, gradient: Tensor) -> None:
        self._buffer, stays = self._disk.passing.take(), "gradient" in self._file_ranges
        # Asynchronous unless the buffer is written to disk next: the write needs the whole gradient.
        self._in_buffer(self._buffer).copy_(gradient, non_blocking=not stays)
        if stays:
            self._disk.write([(self._file_ranges["gradient"], self._buffer)])
            self.drop_gradient()

    def drop_gradient(self) -> None:
        if self._buffer is not None:
            self._disk.passing.give_back(self._buffer)
            self._buffer = None

    def kept_bytes(self) -> dict[Purpose, int]:
        kept: Counter[Purpose] = Counter()
        for section, file_range in self._file_ranges.items():
            kept[_PURPOSES[section]] += file_range.size
        return dict(kept)

    def update(self, spec: OptimizerSpec, rate: float, scale: float, idle: Sequence[range] = ()) -> None:
        turns = [*self._turns(_UpdateArguments(spec, rate, scale, idle))]
        reads: dict[int, Future[dict[Section, Tensor]]] = {}
        writes: dict[int, Future[None]] = {}
        try:
            # Record a failure before the `finally` below waits for requests in flight, because these may hang.
            with self._disk.failure.noticed():
                # The buffers of turn t belong first to the read of its chunk, then to the computation, then to the
                # write. The read of turn t + CHUNKS_AT_A_TIME uses the same buffers, so it starts once this write is
                # done. A turn that reads what an earlier turn writes is not read before that write is done.
                for number, turn in enumerate(turns):
                    for ahead in range(number, min(number + 2, len(turns))):
                        if ahead not in reads and self._is_written(turns, writes, ahead, number):
                            written = writes.get(ahead - CHUNKS_AT_A_TIME)
                            reads[ahead] = self._start_read(turns[ahead], ahead, written)
                    turn.compute(turn, reads[number].result() | self._written_chunks(turn, number))
                    writes[number] = self._disk.threads.submit(self._write_chunk, turn, number)
                for written in writes.values():
                    written.result()
        finally:
            # After a failure, too: requests in flight would collide with the next user of these buffers.
            wait(reads.values())
            wait(writes.values())
            self.drop_gradient()
        self.steps += 1

    def close(self) -> None:
        self._disk.close()

    def _in_buffer(self, buffer: Tensor) -> Tensor:
        """Return the gradient in the buffer, [length]."""
        return buffer.view(self.shard.gradient)[: self.shard.length]

    def _read_weights(self, after: Future[Any]) -> tuple[Tensor, Tensor]:
        """Read the weights in the compute dtype. Return them and their buffer."""
        after.result()
        # `take` waits until the device has read the previous content; this state owns the buffer until
        # `release_weights`.
        buffer = self._staging.take()
        (weights,) = self._disk.read([(self._file_ranges.get("compute", self._file_ranges["weights"]), buffer)])
        return weights, buffer

    def _turns(self, arguments: _UpdateArguments) -> Iterator[_Turn]:
        """Yield the turns of an update, in order."""
        shard, idle = self.shard, arguments.idle
        for matrix in without(shard.ranges, idle, shard.begin):
            if matrix.is_of_muon:
                yield from self._turns_of_matrix(matrix, arguments)
        first = shard.first_stored("second_moment")
        for begin in range(first, shard.length, CHUNK):
            elements = range(begin, min(begin + CHUNK, shard.length))
            if any(not one.is_of_muon for one in self._ranges(elements, idle)):
                compute = partial(self._update_chunk, arguments=arguments)
                yield _Turn(elements, self._having(_READ), self._having(_WRITTEN), compute)

    def _turns_of_matrix(self, matrix: UpdateRange, arguments: _UpdateArguments) -> Iterator[_Turn]:
        """Yield the turns for a matrix of Muon: over its momentum and gradient, then over its weights. Between the two
        the matrix is orthogonalized: its direction is in memory as a whole."""
        pages = in_pages(matrix.begin, matrix.end, self.shard.length)
        chunks = [pages[first : first + CHUNK] for first in range(0, len(pages), CHUNK)]
        for elements in chunks:
            accumulate = partial(
                self._accumulate_chunk, matrix=matrix, arguments=arguments, is_last=elements is chunks[-1]
            )
            yield _Turn(elements, self._having(("first_moment", "gradient")), ("first_moment",), accumulate)
        for elements in chunks:
            apply = partial(self._apply_chunk, matrix=matrix, arguments=arguments)
            yield _Turn(elements, ("weights",), self._having(("weights", "compute")), apply)

    def _having(self, sections: tuple[Section, ...]) -> tuple[Section, ...]:
        """Return the sections that are in the file; without the gradient if it is in memory."""
        in_memory = () if self._buffer is None else ("gradient",)
        return tuple(one for one in sections if one in self._file_ranges and one not in in_memory)

    def _is_written(self, turns: Sequence[_Turn], writes: Mapping[int, Future[None]], ahead: int, current: int) -> bool:
        """Return whether everything that turn `ahead` reads is written; wait for writes of turns before `current`."""
        # Earlier writes are done: the reads between have waited for them, because they use the same buffers.
        possible = range(max(0, ahead - CHUNKS_AT_A_TIME + 1), ahead)
        before = [number for number in possible if turns[ahead].follows_write_of(turns[number])]
        for number in before:
            if number < current:
                writes[number].result()
        return all(number < current for number in before)

    def _start_read(self, turn: _Turn, number: int, written: Future[None] | None) -> Future[dict[Section, Tensor]]:
        """Start to read a chunk into the buffers of an earlier chunk, once the earlier chunk is written."""
        if written is not None:
            written.result()
        return self._disk.threads.submit(self._read_chunk, turn, number)

    def _read_chunk(self, turn: _Turn, number: int) -> dict[Section, Tensor]:
        buffers = self._disk.chunks[number % CHUNKS_AT_A_TIME]
        pieces = [(self._file_ranges[section].chunk(turn.elements), buffers[section]) for section in turn.reads]
        return dict(zip(turn.reads, self._disk.read(pieces), strict=True))

    def _written_chunks(self, turn: _Turn, number: int) -> dict[Section, Tensor]:
        """Return section -> memory of the chunk, for the sections that are written without being read."""
        buffers = self._disk.chunks[number % CHUNKS_AT_A_TIME]
        sections = set(turn.writes).difference(turn.reads)
        return {section: self._file_ranges[section].chunk(turn.elements).view(buffers[section]) for section in sections}

    def _gradient_of(self, turn: _Turn, chunk: Mapping[Section, Tensor]) -> Tensor:
        if self._buffer is None:
            return chunk["gradient"]
        return self._in_buffer(self._buffer)[turn.elements.start : turn.elements.stop]

    def _accumulate_chunk(
        self,
        turn: _Turn,
        chunk: Mapping[Section, Tensor],
        *,
        matrix: UpdateRange,
        arguments: _UpdateArguments,
        is_last: bool,
    ) -> None:
        muon, direction = self._disk.adamw.muon, self._direction(matrix)
        in_chunk, in_matrix = _common(turn.elements, matrix)
        gradient = self._gradient_of(turn, chunk)[in_chunk]
        muon.accumulate(direction[in_matrix], chunk["first_moment"][in_chunk], gradient, arguments.scale)
        if is_last:
            muon.orthogonalize(matrix, direction, arguments.rate)

    def _apply_chunk(
        self, turn: _Turn, chunk: Mapping[Section, Tensor], *, matrix: UpdateRange, arguments: _UpdateArguments
    ) -> None:
        in_chunk, in_matrix = _common(turn.elements, matrix)
        change = self._direction(matrix)[in_matrix]
        self._disk.adamw.muon.apply(chunk["weights"][in_chunk], change, matrix, arguments.rate)
        if "compute" in chunk:
            chunk["compute"].copy_(chunk["weights"])

    def _direction(self, matrix: UpdateRange) -> Tensor:
        return self._disk.adamw.muon.direction(matrix, self.shard.master, torch.device("cpu"))

    def _update_chunk(self, turn: _Turn, chunk: Mapping[Section, Tensor], *, arguments: _UpdateArguments) -> None:
        weights, begin = chunk["weights"], turn.elements.start
        ranges = tuple(one for one in self._ranges(turn.elements, arguments.idle) if not one.is_of_muon)
        compute = chunk.get("compute")
        if compute is not None and (arguments.idle or self.shard.of_muon):
            # Fill the whole chunk first: the buffer held another chunk, the update fills only elements of `ranges`, and
            # all elements are written to disk.
            compute.copy_(weights)
        random = tuple(one.moved(-begin) for one in self.shard.random)
        gradient = self._gradient_of(turn, chunk)
        slices = Slices(
            weights, chunk["first_moment"], chunk["second_moment"], gradient, compute, ranges, random=random
        )
        self._disk.adamw.update(arguments.spec, slices, self.steps, arguments.rate, arguments.scale)

    def _ranges(self, elements: range, idle: Sequence[range]) -> tuple[UpdateRange, ...]:
        """Return the update ranges of a chunk, relative to its first element, without idle elements."""
        whole = cut(self.shard.ranges, elements.start, elements.stop)
        return without(whole, idle, self.shard.begin + elements.start)

    def _write_chunk(self, turn: _Turn, number: int) -> None:
        buffers = self._disk.chunks[number % CHUNKS_AT_A_TIME]
        self._disk.write(
            [(self._file_ranges[section].chunk(turn.elements), buffers[section]) for section in turn.writes]
        )


def _common(elements: range, matrix: UpdateRange) -> tuple[slice, slice]:
    """Return the elements that a chunk and a matrix have in common, relative to the chunk and to the matrix."""
    begin, end = max(elements.start, matrix.begin), min(elements.stop, matrix.end)
    return (
        slice(begin - elements.start, end - elements.start),
        slice(begin - matrix.begin, end - matrix.begin),
    )


def open_disk_states(
    folder: Path,
    shards: Mapping[int, Shard],
    staging: Mapping[int, Staging],
    passing: BounceBuffers,
    adamw: AdamW,
    trace: Trace,
    *,
    keeps_gradients: bool,
    failure: FirstFailure | None = None,
    enter_thread: Callable[[], None] = lambda: None,
) -> dict[int, State]:
    """Return unit -> state, all in one file of this rank.

    `keeps_gradients`: whether gradients are kept on the disk. `staging`: unit -> buffers for its weights on their way
    to the device. `failure`: record of the rank's first failure. `enter_thread`: called first in each thread. Raises
    DiskError if the file does not fit.
    """
    file_ranges: dict[int, dict[Section, _FileRange]] = {}
    end = 0
    for unit, shard in shards.items():
        file_ranges[unit] = {}
        for section, dtype in _sections(shard, keeps_gradient=keeps_gradients):
            first = shard.first_stored(section) if section == "second_moment" else 0
            file_ranges[unit][section] = _FileRange(end, shard.length - first, dtype, first)
            end += aligned(file_ranges[unit][section].size)
    disk = Disk(folder, end, DiskBuffers(passing, _chunks(shards)), adamw, trace, failure, enter_thread)
    return {unit: DiskState(shard, disk, file_ranges[unit], staging[unit]) for unit, shard in shards.items()}


def _sections(shard: Shard, *, keeps_gradient: bool) -> Iterator[tuple[Section, torch.dtype]]:
    kinds: tuple[Kind, ...] = ("weights", "first_moment", "second_moment")
    yield from ((kind, shard.dtype_of(kind)) for kind in kinds)
    if keeps_gradient:
        yield "gradient", shard.gradient
    if shard.compute != shard.master:
        yield "compute", shard.compute


def _chunks(shards: Mapping[int, Shard]) -> list[dict[Section, Tensor]]:
    length = min(max(shard.length for shard in shards.values()), CHUNK)
    shard = next(iter(shards.values()))
    sections = dict(_sections(shard, keeps_gradient=True))
    return [
        {section: aligned_buffer(_FileRange(0, length, dtype).size) for section, dtype in sections.items()}
        for _ in range(CHUNKS_AT_A_TIME)
    ]


assert all(
    stored_length(elements, dtype) * dtype.itemsize % PAGE == 0
    for elements in (CHUNK, PUT_ELEMENTS)
    for dtype in (torch.bfloat16, BLOCKS)
), "chunks of every dtype start page-aligned"

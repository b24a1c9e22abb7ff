"""The state of units whose home is a disk: read ahead, updated in chunks, written behind; buffers of a fixed size."""

from collections import Counter, deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from pseudoreal_api.model_spec import Optimizer as OptimizerSpec
from torch import Tensor

from pseudoreal_trainer.engine.adamw import AdamW, Slices
from pseudoreal_trainer.engine.direct_file import ALIGNMENT, DirectFile, aligned, aligned_buffer
from pseudoreal_trainer.engine.lanes import Mark, reach
from pseudoreal_trainer.engine.state import Content, Extent, State
from pseudoreal_trainer.engine.trace import Trace
from pseudoreal_trainer.plan.units import Kind

Section = Kind | Literal["compute", "gradient"]
_CONTENTS: dict[Section, Content] = {
    "weights": "weights",
    "compute": "weights",
    "first_moment": "moments",
    "second_moment": "moments",
    "gradient": "gradients",
}

CHUNK = 1 << 20
"""Elements of each vector that are in memory at a time during an update."""
_CHUNKS_AT_A_TIME = 3
"""One is read, one updated, one written."""


@dataclass(frozen=True)
class _Place:
    """Where a section of a unit's state begins in the file."""

    offset: int
    length: int
    dtype: torch.dtype

    def chunk(self, begin: int) -> tuple[int, int]:
        """Offset and elements of the chunk that begins at an element."""
        return self.offset + begin * self.dtype.itemsize, min(CHUNK, self.length - begin)


@dataclass(frozen=True)
class _Step:
    """What is the same for all chunks of an update."""

    spec: OptimizerSpec
    rate: float
    scale: float


class _Disk:
    """The file of a rank, its threads and its buffers."""

    def __init__(self, folder: Path, size: int, staging: list[Tensor], chunk: int, adamw: AdamW, trace: Trace) -> None:
        """`staging`: buffers for the weights of a unit in the compute type. `chunk`: bytes of a chunk of one vector, at
        most."""
        self.file, self.adamw, self.trace = DirectFile(folder, size), adamw, trace
        self.threads = ThreadPoolExecutor(2, "disk")
        # Each with the moment from which it is free; the one that has been free for the longest time comes first.
        self.staging: deque[tuple[Tensor, Mark]] = deque((buffer, None) for buffer in staging)
        self.chunks = [[aligned_buffer(chunk) for _ in range(5)] for _ in range(_CHUNKS_AT_A_TIME)]
        self._open = 0

    def read(self, place: _Place, begin: int, buffer: Tensor) -> Tensor:
        """The chunk that begins at an element, as a tensor in the buffer."""
        offset, count = place.chunk(begin)
        return self.read_bytes(offset, count * place.dtype.itemsize, buffer).view(place.dtype)[:count]

    def read_bytes(self, offset: int, size: int, buffer: Tensor) -> Tensor:
        with self.trace.span("disk", None, "read"):
            self.file.read(offset, buffer[: aligned(size)])
        self.trace.move("disk_read", size)
        return buffer[:size]

    def write(self, place: _Place, begin: int, buffer: Tensor) -> None:
        """The chunk that begins at an element, from a buffer that holds it."""
        offset, count = place.chunk(begin)
        with self.trace.span("disk", None, "write"):
            self.file.write(offset, buffer[: aligned(count * place.dtype.itemsize)])
        self.trace.move("disk_write", count * place.dtype.itemsize)

    def open(self) -> None:
        self._open += 1

    def close(self) -> None:
        """The last state that closes it closes the file."""
        self._open -= 1
        if self._open == 0:
            self.threads.shutdown()
            self.file.close()


class DiskState(State):
    def __init__(self, extent: Extent, disk: _Disk, places: Mapping[Section, _Place]) -> None:
        super().__init__(extent)
        self._disk, self._places = disk, places
        self._gradient: Tensor | None = None
        self._reading: Future[tuple[Tensor, Tensor]] | None = None
        disk.open()

    def put(self, kind: Kind, values: Tensor) -> None:
        self._write(kind, values)
        if kind == "weights" and "compute" in self._places:
            self._write("compute", values.to(self.extent.compute))

    def part(self, kind: Kind, begin: int, end: int) -> Tensor:
        place = self._places[kind]
        first, last = (index * place.dtype.itemsize for index in (begin, end))
        start = first // ALIGNMENT * ALIGNMENT
        found = self._disk.read_bytes(place.offset + start, last - start, aligned_buffer(last - start))
        return found.view(place.dtype)[(first - start) // place.dtype.itemsize :]

    def read_ahead(self, after: Future[Any]) -> None:
        self._reading = self._disk.threads.submit(self._stage, after)

    def compute_weights(self) -> Tensor:
        assert self._reading is not None, "the plan reads before it fetches"
        return self._reading.result()[0]

    def is_read(self) -> bool:
        return self._reading is None or self._reading.done()

    def fetched(self, mark: Mark) -> None:
        assert self._reading is not None, "it was fetched"
        self._disk.staging.append((self._reading.result()[1], mark))
        self._reading = None

    def keep_gradient(self, gradient: Tensor) -> None:
        if "gradient" in self._places:
            self._write("gradient", gradient)
        else:
            self._gradient = gradient.to("cpu", copy=True)

    def drop_gradient(self) -> None:
        self._gradient = None

    def gradient(self) -> Tensor:
        return self._read("gradient") if self._gradient is None else self._gradient

    def kept_bytes(self) -> dict[Content, int]:
        kept: Counter[Content] = Counter()
        for section, place in self._places.items():
            kept[_CONTENTS[section]] += place.length * place.dtype.itemsize
        return dict(kept)

    def update(self, spec: OptimizerSpec, rate: float, scale: float) -> None:
        begins = list(range(0, self.extent.length, CHUNK))
        reads: dict[int, Future[list[Tensor]]] = {}
        writes: dict[int, Future[None]] = {}
        for turn, begin in enumerate(begins):
            for ahead in range(turn, min(turn + 2, len(begins))):
                if ahead not in reads:
                    reads[ahead] = self._start_read(begins[ahead], ahead, writes.get(ahead - _CHUNKS_AT_A_TIME))
            chunk = reads.pop(turn).result()
            self._update_chunk(turn, begin, chunk, _Step(spec, rate, scale))
            writes[turn] = self._disk.threads.submit(self._write_chunk, begin, turn)
        for written in writes.values():
            written.result()
        self._gradient = None
        self.steps += 1

    def close(self) -> None:
        self._disk.close()

    def _stage(self, after: Future[Any]) -> tuple[Tensor, Tensor]:
        """The weights in the compute type, and the buffer in which they are."""
        after.result()
        buffer, free = self._disk.staging.popleft()
        reach(free)
        place = self._places.get("compute", self._places["weights"])
        size = place.length * place.dtype.itemsize
        return self._disk.read_bytes(place.offset, size, buffer).view(place.dtype), buffer

    def _start_read(self, begin: int, turn: int, written: Future[None] | None) -> Future[list[Tensor]]:
        """Into the buffers of an earlier chunk, once that is written."""
        if written is not None:
            written.result()
        return self._disk.threads.submit(self._read_chunk, begin, turn)

    def _buffers(self, turn: int) -> dict[Section, Tensor]:
        sections: tuple[Section, ...] = ("weights", "first_moment", "second_moment", "gradient", "compute")
        return dict(zip(sections, self._disk.chunks[turn % _CHUNKS_AT_A_TIME], strict=True))

    def _read_chunk(self, begin: int, turn: int) -> list[Tensor]:
        buffers = self._buffers(turn)
        chunk = [
            self._disk.read(self._places[section], begin, buffer)
            for section, buffer in buffers.items()
            if section != "compute" and (section != "gradient" or self._gradient is None)
        ]
        if self._gradient is not None:
            chunk.append(self._gradient[begin : begin + CHUNK])
        return chunk

    def _update_chunk(self, turn: int, begin: int, chunk: list[Tensor], step: _Step) -> None:
        weights, first, second, gradient = chunk
        decayed = min(max(self.extent.decayed - begin, 0), len(weights))
        compute = None
        if "compute" in self._places:
            compute = self._buffers(turn)["compute"].view(self.extent.compute)[: len(weights)]
        slices = Slices(weights, first, second, gradient, compute, decayed)
        self._disk.adamw.update(step.spec, slices, self.steps, step.rate, step.scale)

    def _write_chunk(self, begin: int, turn: int) -> None:
        buffers = self._buffers(turn)
        for section in ("weights", "first_moment", "second_moment"):
            self._disk.write(self._places[section], begin, buffers[section])
        if "compute" in self._places:
            self._disk.write(self._places["compute"], begin, buffers["compute"])

    def _read(self, section: Section) -> Tensor:
        """A vector of its own, [length]."""
        place = self._places[section]
        whole = torch.empty(place.length, dtype=place.dtype)
        buffer = aligned_buffer(CHUNK * place.dtype.itemsize)
        for begin in _chunk_begins(place.length):
            whole[begin : begin + CHUNK] = self._disk.read(place, begin, buffer)
        return whole

    def _write(self, section: Section, values: Tensor) -> None:
        place = self._places[section]
        buffer = aligned_buffer(CHUNK * place.dtype.itemsize)
        for begin in _chunk_begins(place.length):
            part = values[begin : begin + CHUNK]
            buffer.view(place.dtype)[: len(part)].copy_(part)
            self._disk.write(place, begin, buffer)


def open_disk_states(
    folder: Path,
    extents: Mapping[int, Extent],
    adamw: AdamW,
    trace: Trace,
    *,
    window: int,
    keeps_gradients: bool,
    pinned: bool,
) -> dict[int, State]:
    """Unit -> state, all in one file of this rank. Raises DiskError when they do not fit."""
    places: dict[int, dict[Section, _Place]] = {}
    end = 0
    for unit, extent in extents.items():
        places[unit] = {}
        for section, dtype in _sections(extent, keeps_gradients=keeps_gradients):
            places[unit][section] = _Place(end, extent.length, dtype)
            end += aligned(extent.length * dtype.itemsize)
    largest = max(extent.length * extent.compute.itemsize for extent in extents.values())
    chunk = max(min(extent.length, CHUNK) * extent.master.itemsize for extent in extents.values())
    # Those whose fetches are under way, and the one that is read ahead.
    staging = [aligned_buffer(largest, pinned=pinned) for _ in range(window + 1)]
    disk = _Disk(folder, end, staging, chunk, adamw, trace)
    return {unit: DiskState(extent, disk, places[unit]) for unit, extent in extents.items()}


def _sections(extent: Extent, *, keeps_gradients: bool) -> Iterator[tuple[Section, torch.dtype]]:
    kinds: tuple[Kind, ...] = ("weights", "first_moment", "second_moment")
    yield from ((kind, extent.master) for kind in kinds)
    if keeps_gradients:
        yield "gradient", extent.master
    if extent.compute != extent.master:
        yield "compute", extent.compute


def _chunk_begins(length: int) -> range:
    return range(0, length, CHUNK)


assert CHUNK * 2 % ALIGNMENT == 0, "chunks of every type begin aligned"

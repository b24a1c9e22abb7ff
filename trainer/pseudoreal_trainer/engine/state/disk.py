"""The state of units whose home is a disk: read ahead, updated in chunks, written behind; buffers of a fixed size."""

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from pseudoreal_api.spec.optimizer import Optimizer as OptimizerSpec
from torch import Tensor

from pseudoreal_trainer.engine.ranks.lanes import Mark, reach
from pseudoreal_trainer.engine.ranks.trace import Trace
from pseudoreal_trainer.engine.state.adamw import AdamW, Slices
from pseudoreal_trainer.engine.state.direct_file import DirectFile, aligned_buffer
from pseudoreal_trainer.engine.state.memory import Content, Extent, State
from pseudoreal_trainer.engine.state.pinned import Slots
from pseudoreal_trainer.forecast.memory.crossing import PAGE
from pseudoreal_trainer.forecast.memory.memory import CHUNK_ELEMENTS, CHUNKS_AT_A_TIME, PORTION_ROOM, aligned
from pseudoreal_trainer.plan.units import Kind

Section = Kind | Literal["compute", "gradient"]
_CONTENTS: dict[Section, Content] = {
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
class _Place:
    """The place of a section, or of a chunk of it, in the file."""

    offset: int
    length: int
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """Bytes."""
        return self.length * self.dtype.itemsize

    def chunk(self, begin: int) -> "_Place":
        """The place of the chunk that begins at an element."""
        return _Place(self.offset + begin * self.dtype.itemsize, min(CHUNK, self.length - begin), self.dtype)

    def in_room(self, room: Tensor) -> Tensor:
        """The place's vector, [length], as a view of the first bytes of `room`."""
        return room[: self.size].view(self.dtype)


@dataclass(frozen=True)
class _Step:
    """The figures of an update that are the same for all chunks."""

    spec: OptimizerSpec
    rate: float
    scale: float


@dataclass(frozen=True)
class Rooms:
    """The memory through which units on disk pass; all of it is bytes that direct I/O accepts."""

    staging: list[Tensor]
    """Rooms for the weights of a unit in the compute type."""
    slots: Slots
    """Rooms for the gradient of a unit, or anything else of it in the master type."""
    chunks: list[dict[Section, Tensor]]
    """Rooms for a chunk of each section of a unit: as many sets as there are chunks in memory at a time."""


class Disk:
    """The file of a rank, its threads and its buffers."""

    def __init__(self, folder: Path, size: int, rooms: Rooms, adamw: AdamW, trace: Trace) -> None:
        self.file, self.adamw, self.trace = DirectFile(folder, size), adamw, trace
        # Each waits for requests: who reads ahead, who reads chunks, who writes them.
        self.threads = ThreadPoolExecutor(3, "disk")
        # Each with the moment from which it is free; the one that has been free for the longest time comes first.
        self.staging: deque[tuple[Tensor, Mark]] = deque((room, None) for room in rooms.staging)
        self.slots, self.chunks = rooms.slots, rooms.chunks
        self._portion = aligned_buffer(PORTION_ROOM)
        self._open = 0

    def read(self, pieces: Sequence[tuple[_Place, Tensor]]) -> list[Tensor]:
        """Reads places of the file, all at the same time, each into its room: their vectors."""
        with self.trace.span("disk", None, "read"):
            self.file.read([(place.offset, room[: aligned(place.size)]) for place, room in pieces])
        self.trace.move("disk_read", sum(place.size for place, _ in pieces))
        return [place.in_room(room) for place, room in pieces]

    def write(self, pieces: Sequence[tuple[_Place, Tensor]]) -> None:
        """Writes places of the file, all at the same time, from rooms that hold their vectors."""
        with self.trace.span("disk", None, "write"):
            self.file.write([(place.offset, room[: aligned(place.size)]) for place, room in pieces])
        self.trace.move("disk_write", sum(place.size for place, _ in pieces))

    def portion(self, place: _Place, begin: int, end: int) -> Tensor:
        """The elements begin..end-1 of a place, [end - begin]. Only one thread asks, and no longer uses what it got
        before."""
        first, last = (index * place.dtype.itemsize for index in (begin, end))
        start = first // PAGE * PAGE
        size = last - start
        room = self._portion if size <= len(self._portion) else aligned_buffer(size)
        (found,) = self.read([(_Place(place.offset + start, size, torch.uint8), room)])
        return found[first - start :].view(place.dtype)

    def open(self) -> None:
        self._open += 1

    def close(self) -> None:
        """Closes the file when the last state that uses it has called this."""
        self._open -= 1
        if self._open == 0:
            self.threads.shutdown()
            self.file.close()


class DiskState(State):
    def __init__(self, extent: Extent, disk: Disk, places: Mapping[Section, _Place]) -> None:
        super().__init__(extent)
        self._disk, self._places = disk, places
        self._slot: Tensor | None = None
        """The slot that holds the gradient on its way to the update, or to the disk and back."""
        self._reading: Future[tuple[Tensor, Tensor]] | None = None
        disk.open()

    def put(self, kind: Kind, values: Tensor) -> None:
        room = self._disk.slots.take()
        sections: tuple[Section, ...] = (kind, "compute") if kind == "weights" else (kind,)
        for section in sections:
            if section in self._places:
                self._places[section].in_room(room).copy_(values)
                self._disk.write([(self._places[section], room)])
        self._disk.slots.give_back(room)

    def part(self, kind: Kind, begin: int, end: int) -> Tensor:
        return self._disk.portion(self._places[kind], begin, end)

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
        self._slot = self._slot if self._slot is not None else self._disk.slots.take()
        kept, stays = self._in_slot(self._slot), "gradient" in self._places
        if gradient.data_ptr() != kept.data_ptr():
            # What goes on to the disk at once has to be there.
            kept.copy_(gradient, non_blocking=not stays)
        if stays:
            self._disk.write([(self._places["gradient"], self._slot)])
            self.drop_gradient()

    def gradient(self) -> Tensor:
        if self._slot is None:
            self._slot = self._disk.slots.take()
            self._disk.read([(self._places["gradient"], self._slot)])
        return self._in_slot(self._slot)

    def drop_gradient(self) -> None:
        if self._slot is not None:
            self._disk.slots.give_back(self._slot)
            self._slot = None

    def kept_bytes(self) -> dict[Content, int]:
        kept: Counter[Content] = Counter()
        for section, place in self._places.items():
            kept[_CONTENTS[section]] += place.size
        return dict(kept)

    def update(self, spec: OptimizerSpec, rate: float, scale: float) -> None:
        step, begins = _Step(spec, rate, scale), range(0, self.extent.length, CHUNK)
        reads: dict[int, Future[dict[Section, Tensor]]] = {}
        writes: dict[int, Future[None]] = {}
        try:
            for turn, begin in enumerate(begins):
                for ahead in range(turn, min(turn + 2, len(begins))):
                    if ahead not in reads:
                        reads[ahead] = self._start_read(begins[ahead], ahead, writes.get(ahead - CHUNKS_AT_A_TIME))
                self._update_chunk(turn, begin, reads[turn].result(), step)
                writes[turn] = self._disk.threads.submit(self._write_chunk, begin, turn)
            for written in writes.values():
                written.result()
        finally:
            # The next who has these buffers would meet what is under way, after a failure too.
            wait(reads.values())
            wait(writes.values())
            self.drop_gradient()
        self.steps += 1

    def close(self) -> None:
        self._disk.close()

    def _in_slot(self, slot: Tensor) -> Tensor:
        """The slot's gradient, [length]."""
        return slot.view(self.extent.master)[: self.extent.length]

    def _stage(self, after: Future[Any]) -> tuple[Tensor, Tensor]:
        """The weights in the compute type, and the buffer in which they are."""
        after.result()
        room, free = self._disk.staging.popleft()
        reach(free)
        (weights,) = self._disk.read([(self._places.get("compute", self._places["weights"]), room)])
        return weights, room

    def _start_read(self, begin: int, turn: int, written: Future[None] | None) -> Future[dict[Section, Tensor]]:
        """Starts to read a chunk into the buffers of an earlier one, once that is written."""
        if written is not None:
            written.result()
        return self._disk.threads.submit(self._read_chunk, begin, turn)

    def _read_chunk(self, begin: int, turn: int) -> dict[Section, Tensor]:
        rooms = self._disk.chunks[turn % CHUNKS_AT_A_TIME]
        sections = [section for section in _READ if section in self._places and not self._passes(section)]
        found = self._disk.read([(self._places[section].chunk(begin), rooms[section]) for section in sections])
        return dict(zip(sections, found, strict=True))

    def _passes(self, section: Section) -> bool:
        """Whether the section is in memory already and need not be read."""
        return section == "gradient" and self._slot is not None

    def _update_chunk(self, turn: int, begin: int, chunk: Mapping[Section, Tensor], step: _Step) -> None:
        weights = chunk["weights"]
        end, compute = begin + len(weights), None
        gradient = chunk["gradient"] if self._slot is None else self._in_slot(self._slot)[begin:end]
        if "compute" in self._places:
            place = self._places["compute"].chunk(begin)
            compute = place.in_room(self._disk.chunks[turn % CHUNKS_AT_A_TIME]["compute"])
        decayed = min(max(self.extent.decayed - begin, 0), len(weights))
        slices = Slices(weights, chunk["first_moment"], chunk["second_moment"], gradient, compute, decayed)
        self._disk.adamw.update(step.spec, slices, self.steps, step.rate, step.scale)

    def _write_chunk(self, begin: int, turn: int) -> None:
        rooms = self._disk.chunks[turn % CHUNKS_AT_A_TIME]
        written = [section for section in _WRITTEN if section in self._places]
        self._disk.write([(self._places[section].chunk(begin), rooms[section]) for section in written])


def open_disk_states(
    folder: Path,
    extents: Mapping[int, Extent],
    keeps_gradient: Callable[[int], bool],
    staging: list[Tensor],
    slots: Slots,
    adamw: AdamW,
    trace: Trace,
) -> dict[int, State]:
    """Unit -> state, all in one file of this rank. `keeps_gradient`: whether a unit's gradient is kept on the disk.
    `staging`: rooms for weights on their way to the device. Raises DiskError when the file does not fit."""
    places: dict[int, dict[Section, _Place]] = {}
    end = 0
    for unit, extent in extents.items():
        places[unit] = {}
        for section, dtype in _sections(extent, keeps_gradient=keeps_gradient(unit)):
            places[unit][section] = _Place(end, extent.length, dtype)
            end += aligned(places[unit][section].size)
    disk = Disk(folder, end, Rooms(staging, slots, _chunks(extents)), adamw, trace)
    return {unit: DiskState(extent, disk, places[unit]) for unit, extent in extents.items()}


def _sections(extent: Extent, *, keeps_gradient: bool) -> Iterator[tuple[Section, torch.dtype]]:
    kinds: tuple[Kind, ...] = ("weights", "first_moment", "second_moment")
    yield from ((kind, extent.master) for kind in kinds)
    if keeps_gradient:
        yield "gradient", extent.master
    if extent.compute != extent.master:
        yield "compute", extent.compute


def _chunks(extents: Mapping[int, Extent]) -> list[dict[Section, Tensor]]:
    length = min(max(extent.length for extent in extents.values()), CHUNK)
    extent = next(iter(extents.values()))
    sections = dict(_sections(extent, keeps_gradient=True))
    rooms = range(CHUNKS_AT_A_TIME)
    return [{section: aligned_buffer(length * dtype.itemsize) for section, dtype in sections.items()} for _ in rooms]


assert CHUNK * 2 % PAGE == 0, "chunks of every type begin aligned"

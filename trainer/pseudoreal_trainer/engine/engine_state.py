"""State of a rank's units between steps: can be set, captured for checkpoints, and measured in bytes. Main thread
only."""

from collections import Counter
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass

import torch
from torch import Tensor

from pseudoreal_trainer.engine.gradients import UpdateThread
from pseudoreal_trainer.engine.ranks.streams import Streams
from pseudoreal_trainer.engine.ranks.trace import Trace
from pseudoreal_trainer.engine.state.memory import Purpose
from pseudoreal_trainer.engine.state.snapshot import Sink, Snapshot, SnapshotRing, Source
from pseudoreal_trainer.engine.state.store import UnitStore
from pseudoreal_trainer.plan.layout import Layout
from pseudoreal_trainer.plan.units import KINDS, Kind


@dataclass(frozen=True)
class UnitState:
    """This rank's shard of a unit's state. Vectors are on the CPU, [length of the shard], in the master dtype, whatever
    the dtype in which the engine keeps moments."""

    vectors: dict[Kind, Tensor]
    steps: int
    """Number of updates done."""

    @classmethod
    def fresh(cls, weights: Mapping[str, Tensor], shard: range) -> "UnitState":
        """Return the state before the first update: `weights` cut to `shard` and padded with zeros, and zero moments.
        `weights`: all parameters of the unit, in order."""
        flat = torch.cat([tensor.flatten() for tensor in weights.values()])[shard.start : shard.stop]
        mine = torch.cat([flat, flat.new_zeros(len(shard) - len(flat))])
        zeros = torch.zeros_like(mine)
        return cls({"weights": mine, "first_moment": zeros, "second_moment": zeros}, 0)


@dataclass(frozen=True)
class MemoryReport:
    """Bytes of memory that a rank holds for its units."""

    state: dict[Purpose, int]
    """Purpose -> bytes kept between steps, in all homes together. The window and buffers shared by units are
    excluded."""
    pinned_arena: int
    """Bytes of the host arena through which state crosses the bus; pinned if there is a GPU."""
    pinned: int
    """Bytes of all pinned host memory of this rank."""
    window: int
    """Bytes of the window's slots."""


class EngineState:
    """State of the units of one rank, while no plan is executed. Updates of the last step may still be in progress."""

    def __init__(self, store: UnitStore, updates: UpdateThread, layout: Layout, streams: Streams, trace: Trace) -> None:
        self._store, self._updates, self._layout = store, updates, layout
        self._streams, self._trace = streams, trace
        self._ring = SnapshotRing(store.memory)

    def has(self, unit: int) -> bool:
        """Return whether this rank holds a part of the unit's state."""
        return unit in self._store.states

    def shard_range(self, unit: int) -> range:
        """Return the range of the unit's flat vector that this rank holds, including padding."""
        shard = self._store.states[unit].shard
        return range(shard.begin, shard.begin + shard.length)

    def put(self, unit: int, state: UnitState) -> None:
        """Set the state of a unit that this rank holds."""
        mine = self._store.states[unit]
        for kind in KINDS:
            mine.put(kind, state.vectors[kind])
        mine.steps = state.steps
        self._store.updates.complete(unit, self._streams.record_event())

    def wait_for_updates(self) -> None:
        """Wait for all updates. Raises the error of an update that failed."""
        self._store.updates.wait()

    def capture(self, spans: Mapping[int, range], sink: Sink, buffer_bytes: int) -> Future[None]:
        """Start a snapshot of the newest step's state and return its future.

        `spans`: unit -> range of its flat vector, in the order in which the sink gets the units. Training may continue
        during the snapshot. The future completes once the sink has received everything.
        """
        sources = [self._source(unit, span) for unit, span in spans.items()]
        crosses_bus = any(self._layout.home(unit) == "Device" for unit in spans)
        ring = self._ring.of_size(buffer_bytes, crosses_bus=crosses_bus)
        capture = Snapshot(sources, sink, ring, self._streams, self._trace)
        # Register the futures before the next plan is executed: updates of the next plan wait for these futures.
        self._updates.wait_for_captures(capture.captured)
        return capture.start()

    def _source(self, unit: int, span: range) -> Source:
        state = self._store.states[unit]
        begin, end = (index - state.shard.begin for index in (span.start, span.stop))
        return Source(unit, state, begin, end, self._store.updates.of(unit))

    @property
    def capture_wait_seconds(self) -> float:
        """Total seconds that updates have waited for captures."""
        return self._updates.capture_wait_seconds

    def memory_report(self) -> MemoryReport:
        kept: Counter[Purpose] = Counter()
        for state in self._store.states.values():
            kept.update(state.kept_bytes())
        # Resident copies of units with another home than the device; other resident copies are counted with their
        # states.
        gathered = (flat for unit, flat in self._store.resident.items() if self._layout.home(unit) != "Device")
        kept["weights"] += sum(flat.nbytes for flat in gathered)
        return MemoryReport(
            state=dict(kept),
            pinned_arena=self._store.arena.size,
            pinned=self._store.memory.pinned,
            window=sum(slot.nbytes for slots in self._store.window.values() for slot in slots),
        )

    def close(self) -> None:
        """Free the buffer of snapshots and the memory of the units. Nothing may use this memory afterwards."""
        self._ring.close()
        self._store.close()

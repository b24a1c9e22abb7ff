"""A rank's memory for its units, on the device, on the host and on a disk. Allocated once, before the first step."""

import threading
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path

import torch
from pseudoreal_api.spec.model import Model
from pseudoreal_api.spec.optimizer import Optimizer as OptimizerSpec
from torch import Tensor

from pseudoreal_trainer.engine.ranks.process_groups import ProcessGroups
from pseudoreal_trainer.engine.ranks.trace import Trace
from pseudoreal_trainer.engine.state.disk import Staging, open_disk_states
from pseudoreal_trainer.engine.state.memory import AdamW, Extent, MemoryState, State, Vectors
from pseudoreal_trainer.engine.state.pinned import PassingBuffers, Region, allocator_for
from pseudoreal_trainer.plan.layout import POOLS, Pool
from pseudoreal_trainer.plan.memory.pinned_arena import STAGING_USE, arena_layout
from pseudoreal_trainer.plan.orders import gradient_buffers
from pseudoreal_trainer.plan.sizes import Sizes
from pseudoreal_trainer.plan.units import Unit
from pseudoreal_trainer.plan.update_ranges import cut, update_ranges


class GradientBuffers:
    """Gradient buffers on the device, shared by units. Only the main thread takes one; only the reduction thread gives
    one back."""

    def __init__(self, numel: int, count: int, dtype: torch.dtype, device: torch.device) -> None:
        self._free = [torch.empty(numel, dtype=dtype, device=device) for _ in range(count)]
        self._asked: deque[Future[Tensor]] = deque()
        """Futures of callers that found no free buffer."""
        self._lock = threading.Lock()

    def take(self) -> Future[Tensor]:
        """Return the future of a buffer, [numel]; it completes at once if one is free, else when the next one is given
        back."""
        taken: Future[Tensor] = Future()
        with self._lock:
            if self._free:
                taken.set_result(self._free.pop())
            else:
                self._asked.append(taken)
        return taken

    def give_back(self, buffer: Tensor) -> None:
        with self._lock:
            if self._asked:
                self._asked.popleft().set_result(buffer)
            else:
                self._free.append(buffer)


class UnitStore:
    """A rank's memory for its units from step to step: the state of each unit in its home, resident working copies and
    gradients, and slots and buffers for streamed units. The layout decides which is which.

    While a step runs, the side threads write states, and so the parts of working copies and whole gradients that states
    are views of. The main thread writes everything else: it gathers a unit's working copy between two updates of the
    unit, and accumulates the unit's gradient between an update and the next reduction.
    """

    def __init__(
        self,
        model: Model,
        optimizer: OptimizerSpec,
        units: Sequence[Unit],
        groups: ProcessGroups,
        trace: Trace,
        *,
        master: torch.dtype,
        compute: torch.dtype,
        folder: Path,
    ) -> None:
        """`folder`: directory of the file of units on disk. Raises TrainingError if a home has too little room."""
        layout, self._optimizer = groups.layout, optimizer
        self.units, self._groups, self._layout, self._master, self._compute = units, groups, layout, master, compute
        self._rank, self._local = groups.pipeline_rank, layout.local_units(groups.pipeline_rank)
        # No activation is stored here, so the number of sequences does not matter.
        self._sizes = Sizes(model, tuple(units), compute.itemsize, master.itemsize, micro_batch=1)
        self.memory = allocator_for(groups.device)
        """Allocator of host memory for copies to and from the device."""
        self.region = Region(arena_layout(layout, self._sizes, self._rank), self.memory)
        """Pinned arena through which states cross the bus."""
        self._passing, self._adamw = PassingBuffers(self.region.all_of("bounce")), AdamW()
        self.resident = {unit: self._on_device(self._padded(unit), self._compute) for unit in self._staying}
        """Unit -> resident working copy, [padded numel], in the compute dtype."""
        self.whole_gradients: dict[int, Tensor] = {}
        """Unit -> resident whole gradient, [padded numel], in the master dtype."""
        self.states: dict[int, State] = {
            **{unit: self._memory_state(unit) for unit in self._local if layout.home(unit) != "Disk"},
            **self._disk_states(folder, trace),
        }
        """Unit -> this rank's part of its state."""
        self.window = {pool: self._window(pool) for pool in POOLS}
        """Slots for streamed working copies, each [padded numel of the pool's largest unit], in the compute dtype."""
        self.gradient_buffers = {pool: self._gradient_buffers(pool) for pool in POOLS}
        """Gradient buffers for all units without a resident whole gradient."""

    def own_part(self, unit: int) -> Tensor:
        """Return this rank's part of a resident working copy, [length], as a view. If the unit's home is the device,
        its state uses the same memory."""
        extent = self._extent(unit)
        return self.resident[unit][extent.begin : extent.begin + extent.length]

    def close(self) -> None:
        """Release resources that the process does not release by itself. Nothing may use them any more."""
        for state in self.states.values():
            state.close()
        self.region.close()

    def _memory_state(self, unit: int) -> MemoryState:
        vectors = self._vectors_on_host(unit) if self._layout.home(unit) == "Host" else self._vectors_on_device(unit)
        return MemoryState(self._extent(unit), vectors, self._adamw, self._passing)

    def _disk_states(self, folder: Path, trace: Trace) -> dict[int, State]:
        extents = {unit: self._extent(unit) for unit in self._local if self._layout.home(unit) == "Disk"}
        if not extents:
            return {}
        staging = self._staging(extents)
        return open_disk_states(
            folder,
            extents,
            staging,
            self._passing,
            self._adamw,
            trace,
            keeps_gradients=self._layout.keeps_gradients,
            failure=self._groups.ranks.heartbeat.failure,
        )

    def _staging(self, units: Iterable[int]) -> dict[int, Staging]:
        """Return unit -> buffers that it shares with the other units of its pool."""
        shared = {pool: Staging(self.region.all_of(STAGING_USE[pool])) for pool in POOLS}
        return {unit: shared[self._layout.pool_of(unit)] for unit in units}

    def _extent(self, unit: int) -> Extent:
        described, layout = self.units[unit], self._layout
        shards = layout.shards(unit)
        shard = described.shard(self._groups.part(unit) if shards > 1 else 0, shards)
        ranges = cut(update_ranges(described, self._optimizer), shard.start, shard.stop)
        return Extent(shard.start, len(shard), ranges, self._master, self._compute)

    def _vectors_on_host(self, unit: int) -> Vectors:
        """Return the vectors of a unit whose home is the host. Vectors that cross the bus are in the pinned arena;
        other vectors are ordinary memory."""
        weights = self.region.vector("weights", unit, self._compute)
        masters = weights if self._master == self._compute else torch.zeros(len(weights), dtype=self._master)
        keeps = self._layout.keeps_gradients
        return Vectors(masters, weights, self.region.vector("gradient", unit, self._master) if keeps else None)

    def _vectors_on_device(self, unit: int) -> Vectors:
        """Return the vectors of a unit whose home is the device. Its shards are parts of the working copy and of the
        gradient, if these are resident and whole."""
        layout, extent, padded = self._layout, self._extent(unit), self._padded(unit)
        own = slice(extent.begin, extent.begin + extent.length)
        weights = self.own_part(unit) if unit in self.resident else self._on_device(extent.length, self._compute)
        masters = weights if self._master == self._compute else self._on_device(extent.length, self._master)
        if layout.has_gradient_shard(unit):
            gradient = self._on_device(extent.length, self._master)
        else:
            self.whole_gradients[unit] = self._on_device(padded, self._master)
            gradient = self.whole_gradients[unit][own]
        return Vectors(
            masters,
            weights,
            gradient,
            compute_parts=layout.shards(unit) if unit in self.resident else 1,
            gradient_parts=layout.shards(unit) if unit in self.whole_gradients else 1,
        )

    @property
    def _staying(self) -> list[int]:
        return [unit for unit in self._local if not self._layout.moves(unit)]

    def _window(self, pool: Pool) -> list[Tensor]:
        size = max(map(self._padded, self._layout.moving_units(self._rank, pool)), default=0)
        return [self._on_device(size, self._compute) for _ in range(self._layout.slots(self._rank, pool))]

    def _gradient_buffers(self, pool: Pool) -> GradientBuffers:
        size = max(map(self._padded, self._layout.buffered_units(self._rank, pool)), default=0)
        count = gradient_buffers(self._layout, self._rank, pool)
        return GradientBuffers(size, count, self._master, self._groups.device)

    def _padded(self, unit: int) -> int:
        """Return the elements of all shards of a unit together, including padding after the last."""
        return self._sizes.whole(self._layout, unit)

    def _on_device(self, length: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(length, dtype=dtype, device=self._groups.device)

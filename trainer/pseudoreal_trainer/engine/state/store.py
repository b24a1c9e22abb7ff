"""A rank's memory for its units, on the device, on the host and on a disk. Allocated once, before the first step."""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path

import torch
from pseudoreal_api.spec.model import Model
from pseudoreal_api.spec.optimizer import Optimizer as OptimizerSpec
from torch import Tensor

from pseudoreal_trainer.accelerator.adapters import kind_of
from pseudoreal_trainer.engine.ranks.process_groups import ProcessGroups
from pseudoreal_trainer.engine.ranks.streams import Event, Updated, synchronize
from pseudoreal_trainer.engine.ranks.trace import Trace
from pseudoreal_trainer.engine.state.blocks import BLOCKS, moment_format
from pseudoreal_trainer.engine.state.disk import Staging, open_disk_states
from pseudoreal_trainer.engine.state.gradient_rounding import GradientRounding
from pseudoreal_trainer.engine.state.memory import AdamW, MemoryState, Shard, State, Vectors
from pseudoreal_trainer.engine.state.muon import Muon
from pseudoreal_trainer.engine.state.pinned import BounceBuffers, PinnedArena, allocator_for
from pseudoreal_trainer.engine.state.rounding import random_ranges
from pseudoreal_trainer.plan.layout import POOLS, Pool
from pseudoreal_trainer.plan.memory.pinned_arena import STAGING_USE, arena_layout
from pseudoreal_trainer.plan.memory.tiers import threads_of_updates
from pseudoreal_trainer.plan.orders import gradient_buffers
from pseudoreal_trainer.plan.sizes import Sizes, fills_blocks
from pseudoreal_trainer.plan.units import Unit
from pseudoreal_trainer.plan.update_ranges import cut, update_ranges


class GradientBuffer:
    """A gradient buffer on the device, for units that use it one after the other. Only the main thread takes the
    buffer; only the reduction thread gives it back."""

    def __init__(self, memory: Tensor) -> None:
        """`memory`: [numel]."""
        self._free: Tensor | None = memory
        self._asked: deque[Future[Tensor]] = deque()
        """Futures of callers that wait for the buffer, oldest first."""
        self._lock = threading.Lock()

    def take(self) -> Future[Tensor]:
        """Return the future of the memory. The future completes at once if the buffer is free. Otherwise it waits for
        the buffer to be given back; the oldest future gets the buffer first."""
        taken: Future[Tensor] = Future()
        with self._lock:
            if self._free is not None:
                taken.set_result(self._free)
                self._free = None
            else:
                self._asked.append(taken)
        return taken

    def give_back(self, memory: Tensor) -> None:
        with self._lock:
            if self._asked:
                self._asked.popleft().set_result(memory)
            else:
                self._free = memory


class NewestUpdates:
    """Newest update of each unit of a rank. Main thread only; the update thread completes the futures."""

    def __init__(self, units: Iterable[int]) -> None:
        self._updates: dict[int, Updated] = {unit: _completed(None) for unit in units}

    def of(self, unit: int) -> Updated:
        """Return the future of the unit's newest update; it yields the event after which the new weights can be
        read."""
        return self._updates[unit]

    def replace(self, unit: int, update: Updated) -> None:
        """Record an update that was enqueued after all earlier updates of the unit."""
        self._updates[unit] = update

    def complete(self, unit: int, event: Event) -> None:
        """Record that the unit's state was set without an update. After `event` the new state can be read."""
        self._updates[unit] = _completed(event)

    def wait(self) -> None:
        """Wait for all updates. Raises the error of an update that failed."""
        for update in self._updates.values():
            synchronize(update.result())


def _completed(event: Event) -> Updated:
    future: Updated = Future()
    future.set_result(event)
    return future


class UnitStore:
    """A rank's memory for its units from step to step: the state of each unit in its home, resident working copies and
    gradients, and slots and buffers for streamed units. The layout decides which units are resident or streamed.

    While a step runs, the reduction and update threads write states, and with them the parts of resident working copies
    and whole gradients that state vectors are views of. The main thread writes everything else: it gathers a unit's
    working copy between two updates of the unit, and accumulates the unit's gradient between an update and the next
    reduction.
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
        moments: torch.dtype,
        gradients: torch.dtype,
        seed: int,
        folder: Path,
        enter_thread: Callable[[], None] = lambda: None,
    ) -> None:
        """`seed`: seed of the random bits that round moments. `folder`: directory of the file of units on disk.
        `enter_thread`: called first in each thread that waits for the device. Raises TrainingError if a home has too
        little room."""
        layout, self._optimizer = groups.layout, optimizer
        self.units, self._groups, self._layout, self._master, self._compute = units, groups, layout, master, compute
        self._moments, self._gradients, self._seed = moments, gradients, seed
        self._rank, self._local = groups.pipeline_rank, layout.local_units(groups.pipeline_rank)
        # No activation is stored here, so the number of sequences does not matter.
        self._sizes = Sizes(
            model,
            tuple(units),
            compute.itemsize,
            master.itemsize,
            micro_batch=1,
            moments=moment_format(moments, master),
            gradients="Master" if gradients == master else "BFloat16",
            uses_muon=optimizer.algorithm == "Muon",
        )
        assert moments != BLOCKS or all(map(fills_blocks, units)), (
            "the job's rules refuse moments in blocks if a tensor does not fill its blocks"
        )
        self.memory = allocator_for(groups.device)
        """Allocator of host memory for copies to and from the device."""
        self.arena = PinnedArena(arena_layout(layout, self._sizes, self._rank), self.memory)
        """Pinned arena through which states cross the bus."""
        self._passing = BounceBuffers(self.arena.all_of("bounce"))
        self._adamw = AdamW(Muon(compute), threads_of_updates(torch.get_num_threads(), kind_of(groups.device)))
        self.resident = {
            unit: self._on_device(self._padded_numel(unit), self._compute) for unit in self._resident_units
        }
        """Unit -> resident working copy, [padded numel], in the compute dtype."""
        self.whole_gradients: dict[int, Tensor] = {}
        """Unit -> resident whole gradient, [padded numel], in the master dtype."""
        self.states: dict[int, State] = {
            **{unit: self._memory_state(unit) for unit in self._local if layout.home(unit) != "Disk"},
            **self._disk_states(folder, trace, enter_thread),
        }
        """Unit -> this rank's part of its state."""
        for unit, state in self.states.items():
            device = groups.device if layout.home(unit) == "Device" else torch.device("cpu")
            self._adamw.muon.reserve(state.shard.ranges, master, device)
        self.updates = NewestUpdates(self.states)
        self.window = {pool: self._window(pool) for pool in POOLS}
        """Pool -> slots for streamed working copies, each [padded numel of the pool's largest unit], in the compute
        dtype."""
        self.gradient_rounding = self._gradient_rounding()
        """Rounding of summed gradients; None: they keep the master dtype."""
        self.gradient_buffers = self._gradient_buffers()
        """Unit without a resident whole gradient -> its gradient buffer, which other units use, too."""

    def own_part(self, unit: int) -> Tensor:
        """Return this rank's part of a resident working copy, [length], as a view. If the unit's home is the device,
        its state uses the same memory."""
        shard = self._shard(unit)
        return self.resident[unit][shard.begin : shard.begin + shard.length]

    def close(self) -> None:
        """Release resources that the process does not release by itself. Nothing may use them any more."""
        for state in self.states.values():
            state.close()
        self.arena.close()

    def _memory_state(self, unit: int) -> MemoryState:
        vectors = self._vectors_on_host(unit) if self._layout.home(unit) == "Host" else self._vectors_on_device(unit)
        return MemoryState(self._shard(unit), vectors, self._adamw, self._passing)

    def _disk_states(self, folder: Path, trace: Trace, enter_thread: Callable[[], None]) -> dict[int, State]:
        shards = {unit: self._shard(unit) for unit in self._local if self._layout.home(unit) == "Disk"}
        if not shards:
            return {}
        staging = self._staging(shards)
        return open_disk_states(
            folder,
            shards,
            staging,
            self._passing,
            self._adamw,
            trace,
            keeps_gradients=self._layout.keeps_gradients,
            failure=self._groups.ranks.heartbeat.failure,
            enter_thread=enter_thread,
        )

    def orthogonalize_zeros(self) -> None:
        """Orthogonalize zeros in the scratch memory of the device: one matrix of each shape that Muon updates there."""
        muon, device = self._adamw.muon, self._groups.device
        on_device = [state for unit, state in self.states.items() if self._layout.home(unit) == "Device"]
        ranges = [one for state in on_device for one in state.shard.ranges if one.is_of_muon]
        matrices = {(one.rows, one.columns): one for one in ranges}
        for matrix in matrices.values():
            muon.orthogonalize(matrix, muon.direction(matrix, self._master, device).zero_(), rate=0.0)

    def _staging(self, units: Iterable[int]) -> dict[int, Staging]:
        """Return unit -> staging buffers, shared by all units of its pool."""
        shared = {pool: Staging(self.arena.all_of(STAGING_USE[pool])) for pool in POOLS}
        return {unit: shared[self._layout.pool_of(unit)] for unit in units}

    def _shard(self, unit: int) -> Shard:
        described, layout = self.units[unit], self._layout
        shards = layout.shards(unit)
        assert shards == 1 or self._optimizer.algorithm != "Muon" or not described.hidden, (
            "check_resolvable refuses layouts that cut matrices of Muon"
        )
        elements = described.shard(self._groups.part(unit) if shards > 1 else 0, shards)
        ranges = cut(update_ranges(described, self._optimizer), elements.start, elements.stop)
        random = random_ranges(described, elements, self._seed) if self._moments != self._master else ()
        return Shard(
            elements.start,
            len(elements),
            ranges,
            self._master,
            self._compute,
            self._moments,
            random,
            has_rounded_gradient=self._gradients != self._master and layout.home(unit) != "Device",
        )

    def _vectors_on_host(self, unit: int) -> Vectors:
        """Return the vectors of a unit whose home is the host. Vectors that cross the bus are in the pinned arena;
        other vectors are ordinary memory."""
        weights = self.arena.vector("weights", unit, self._compute)
        masters = weights if self._master == self._compute else torch.zeros(len(weights), dtype=self._master)
        gradient = self.arena.vector("gradient", unit, self._gradients) if self._layout.keeps_gradients else None
        return Vectors(masters, weights, gradient, keeps_previous=self._layout.is_speculative(unit))

    def _vectors_on_device(self, unit: int) -> Vectors:
        """Return the vectors of a unit whose home is the device. If the working copy or the gradient is resident and
        whole, this rank's vector is a part of it."""
        layout, shard, padded = self._layout, self._shard(unit), self._padded_numel(unit)
        own = slice(shard.begin, shard.begin + shard.length)
        weights = self.own_part(unit) if unit in self.resident else self._on_device(shard.length, self._compute)
        masters = weights if self._master == self._compute else self._on_device(shard.length, self._master)
        if layout.has_gradient_shard(unit):
            gradient = self._on_device(shard.length, self._master)
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
    def _resident_units(self) -> list[int]:
        return [unit for unit in self._local if not self._layout.moves(unit)]

    def _window(self, pool: Pool) -> list[Tensor]:
        size = max(map(self._padded_numel, self._layout.moving_units(self._rank, pool)), default=0)
        return [self._on_device(size, self._compute) for _ in range(self._layout.slots(self._rank, pool))]

    def _gradient_rounding(self) -> GradientRounding | None:
        if self._gradients == self._master:
            return None
        return GradientRounding(max(state.shard.length for state in self.states.values()), self._groups.device)

    def _gradient_buffers(self) -> dict[int, GradientBuffer]:
        found: dict[int, GradientBuffer] = {}
        for units in gradient_buffers(self._layout, self._rank):
            size = max(map(self._padded_numel, units))
            memory = torch.empty(size, dtype=self._master, device=self._groups.device)
            found.update(dict.fromkeys(units, GradientBuffer(memory)))
        return found

    def _padded_numel(self, unit: int) -> int:
        """Return the number of elements of all shards of a unit together, including the padding at the end."""
        return self._sizes.whole(self._layout, unit)

    def _on_device(self, length: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(length, dtype=dtype, device=self._groups.device)

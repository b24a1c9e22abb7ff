"""Working copies of units: resident copies, and streamed copies in a window of device slots. Main thread only."""

import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from pseudoreal_trainer.engine.ranks.process_groups import ProcessGroups, UnitGroups
from pseudoreal_trainer.engine.ranks.streams import Event, Stream, Streams
from pseudoreal_trainer.engine.ranks.trace import Trace
from pseudoreal_trainer.engine.state.store import UnitStore
from pseudoreal_trainer.model.modules import UnitModule
from pseudoreal_trainer.model.recomputation import Recomputed, pack, recomputing
from pseudoreal_trainer.plan.records import Drop, Fetch, Read


class NotResident(RuntimeError):
    """Raised if the weights of a unit are requested before its fetch has finished, or while the unit has no working
    copy."""


class PendingAllGather:
    """Hierarchical all-gather of a unit in flight: first across replicas, then within this replica.

    A stage is skipped if its group has one rank. On an accelerator the second stage is launched at once, because a
    stream waits for the first. On a CPU the calling thread itself would wait for the first stage, while other pipeline
    ranks may need this thread. So on a CPU the second stage is launched once `can_launch_second` is true, or when the
    plan needs the copy. All ranks launch second stages in the order of the first stages.
    """

    def __init__(self, groups: UnitGroups, flat: Tensor, part: Tensor, streams: Streams, trace: Trace) -> None:
        """`flat`: output, [all parts]. `part`: this rank's own part, on the same device. The gather owns both tensors
        until it is done; `part` must not change before then."""
        self._groups, self._flat, self._part, self._streams, self._trace = groups, flat, part, streams, trace
        self._first: dist.Work | None = None
        """First of two stages, until the second is launched."""
        self._last: dist.Work | None = None
        if groups.inter is None:
            self._last = self._gather_intra(part)
        elif groups.intra is None:
            self._last = self._gather_inter()
        else:
            self._first = self._gather_inter()
            if flat.device.type != "cpu":
                self.launch_second()

    @property
    def is_launched(self) -> bool:
        """Whether all stages were launched."""
        return self._first is None

    @property
    def can_launch_second(self) -> bool:
        """Whether the second stage can be launched without waiting."""
        return self._first is None or self._first.is_completed()

    def launch_second(self) -> None:
        """Wait for the first stage and launch the second. Does nothing if the second stage was launched before."""
        if self._first is not None:
            with self._streams.on(Stream.GATHER):
                self._first.wait()
                self._last = self._gather_intra(self._groups.inter_slice(self._flat))
            self._first = None

    def wait(self) -> None:
        self.launch_second()
        if self._last is not None:
            self._last.wait()

    def _gather_inter(self) -> dist.Work | None:
        inter_slice = self._groups.inter_slice(self._flat)
        self._trace.count_bytes("replicas", inter_slice.nbytes - self._part.nbytes)
        return dist.all_gather_into_tensor(inter_slice, self._part, group=self._groups.inter, async_op=True)

    def _gather_intra(self, own: Tensor) -> dist.Work | None:
        if self._groups.intra is None:
            return None
        self._trace.count_bytes("collective", self._flat.nbytes - own.nbytes)
        return dist.all_gather_into_tensor(self._flat, own, group=self._groups.intra, async_op=True)


@dataclass(frozen=True)
class _Slot:
    """A free slot of the window, on the device."""

    storage: Tensor
    free: Event
    """CUDA event after which no kernel reads the slot's previous unit."""


@dataclass
class _Copy:
    """A working copy in a slot, from the start of its fetch to its drop."""

    slot: _Slot
    flat: Tensor
    """Working copy, [padded numel], in the compute dtype."""
    weights: Tensor
    """This rank's shard, [length], the input of the all-gather.

    Kept as long as the copy. Freed memory could be overwritten by the next fetch while other ranks still read the
    shard.
    """
    gather: PendingAllGather | None
    event: Event
    fetch: Fetch
    begin: int
    """Start of the fetch, in nanoseconds of time.perf_counter_ns."""
    finished: bool = False
    """Whether the compute stream waits for the fetch, so that passes may use the copy."""


class Copies:
    """Working copies of a rank, and the weights that each module is bound to."""

    def __init__(self, store: UnitStore, groups: ProcessGroups, streams: Streams, trace: Trace) -> None:
        self._store, self._updates, self._groups, self._layout = store, store.updates, groups, groups.layout
        self._free = {
            pool: [_Slot(slot, streams.record_event()) for slot in slots] for pool, slots in store.window.items()
        }
        self._streams, self._trace, self._heartbeat = streams, trace, groups.ranks.heartbeat
        self._copies: dict[int, _Copy] = {}
        self._refreshing: dict[int, PendingAllGather | None] = {}
        self._pending: deque[Fetch] = deque()
        """Fetches that have not started because their units are still being updated or read from disk, in plan
        order."""
        self._half_launched: deque[tuple[int, PendingAllGather]] = deque()
        """(unit, all-gather whose second stage has not started), in plan order."""
        self._unread: dict[int, None] = {}
        """Units whose disk read has not started because they are still being updated. A disk thread must not wait for
        an update: the update itself needs disk threads."""
        self._wanted: dict[tuple[int, int], bool] = {}
        """(position, unit with a group of the position's experts) -> whether tokens were routed to the group."""
        self._skipped_fetches: set[int] = set()
        """Units whose fetch was skipped because no tokens were routed to them, until their Drop."""
        self._bound: dict[UnitModule, Tensor] = {}
        self._slot_addresses = {s.untyped_storage().data_ptr() for slots in store.window.values() for s in slots}
        self._owners: dict[int, int] = {}
        """Address of an occupied slot -> the unit in it."""
        self._dropped: Event = None
        """Event recorded after the newest drop of a copy, in any pool. The allocator may give the dropped shard's
        memory to the next fetch, into any slot; before this event, other ranks may still be reading the shard."""

    def record_routed_groups(self, position: int, units: Mapping[int, bool]) -> None:
        """Record which units of a position got tokens. `units`: unit -> whether tokens were routed to it. In this step,
        reads and fetches for the position skip units without tokens."""
        self._wanted |= {(position, unit): is_wanted for unit, is_wanted in units.items()}

    def _is_wanted(self, record: Read | Fetch) -> bool:
        return record.wanted_by is None or self._wanted[record.wanted_by, record.unit]

    def read(self, record: Read) -> None:
        if self._is_wanted(record):
            self._unread[record.unit] = None
            self._read_updated()

    def fetch(self, record: Fetch) -> None:
        """Start a fetch once its unit has been updated and, if its home is a disk, read.

        Until then, passes with other working copies continue. This cannot deadlock: if a fetch has not started by the
        record that needs its copy, it starts at that record, in the same order on all ranks. The main thread then waits
        for the unit's update, and the update depends on no later work of the main thread. The fetch of a cross-stage
        unit starts in this call, because other pipeline ranks may wait for the gather while this rank waits for one of
        their messages.
        """
        if not self._is_wanted(record):
            self._skipped_fetches.add(record.unit)
            return
        self._pending.append(record)
        if self._layout.is_common(record.unit):
            self.start_all()
        else:
            self.start_ready()

    def start_ready(self) -> None:
        """Start the pending reads and fetches whose units are ready; does not wait for other units."""
        self._read_updated()
        while self._pending and self._is_ready(self._pending[0].unit):
            self._start(self._pending.popleft())
        # Launch second stages only from the front of the queue, so that all ranks launch them in the order of the first
        # stages. Ranks may launch them at different times, because until `start_all` nothing else uses the groups
        # within replicas.
        while self._half_launched and self._half_launched[0][1].can_launch_second:
            self._launch_second()

    def start_all(self) -> None:
        """Start all pending fetches. Waits for the updates and reads of their units.

        Call this before another collective of the same ranks: units become ready at different times on different ranks,
        but all ranks must launch their collectives in plan order.
        """
        while self._pending:
            self._start(self._pending.popleft())
        while self._half_launched:
            self._launch_second()

    def drop(self, record: Drop) -> None:
        """Free the slot of a working copy, once the fetch has finished. Does nothing if the fetch was skipped."""
        if record.unit in self._skipped_fetches:
            self._skipped_fetches.remove(record.unit)
            return
        # Finish the fetch even if no pass has used the copy: the tokens may all be on other ranks.
        self._finish_fetch(record.unit)
        copy = self._copies.pop(record.unit)
        self._bound = {module: flat for module, flat in self._bound.items() if flat is not copy.flat}
        self._owners.pop(copy.flat.data_ptr())
        self._dropped = self._streams.record_event()
        self._free[self._layout.pool_of(record.unit)].append(_Slot(copy.slot.storage, self._dropped))
        self._trace.add("fetch", time.perf_counter_ns(), record)

    def bind(self, unit: int, module: UnitModule) -> None:
        """Bind the module to the unit's weights; waits for the fetch."""
        flat = self._finish_fetch(unit)
        if self._bound.get(module) is not flat:
            module.bind(flat)
            self._bound[module] = flat

    def flat(self, unit: int) -> Tensor:
        """Return the working copy of a unit, [padded numel]. Raises NotResident if the unit has no working copy, or if
        its fetch is not finished."""
        if unit in self._store.resident:
            return self._store.resident[unit]
        copy = self._copies.get(unit)
        if copy is None or not copy.finished:
            state = "has no working copy" if copy is None else "is being fetched"
            raise NotResident(f"unit {unit} {state}")
        return copy.flat

    def unbind(self) -> None:
        """Forget which weights the modules are bound to. Call this after other code has bound the modules to other
        weights."""
        self._bound.clear()

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Context of a forward pass that keeps its graph. For weights of streamed units, autograd saves only places in
        the unit: the backward pass may find the unit in another slot. With `keep: Products`, autograd saves no tensors
        that are marked as recomputed. In all other cases there are no hooks, because hooks cost Python time for each
        saved tensor."""
        is_selective = self._layout.keep == "Products"
        if not (self._slot_addresses or is_selective):
            yield
            return
        with recomputing(enabled=is_selective), saved_tensors_hooks(self._pack, self._unpack):
            yield

    def _is_ready(self, unit: int) -> bool:
        return (
            self._updates.of(unit).done() and unit not in self._unread and self._store.states[unit].are_weights_ready()
        )

    def _read_updated(self) -> None:
        for unit in [unit for unit in self._unread if self._updates.of(unit).done()]:
            self._read(unit)

    def _read(self, unit: int) -> None:
        self._unread.pop(unit)
        self._store.states[unit].read_ahead(self._updates.of(unit))

    def _start(self, record: Fetch) -> None:
        if self._layout.moves(record.unit):
            self._copies[record.unit] = self._start_fetch(record)
        else:
            self._refresh(record)

    def _launch_second(self) -> None:
        unit, gather = self._half_launched.popleft()
        with self._heartbeat.waiting(f"gathers unit {unit}"):
            gather.launch_second()

    def _finish_fetch(self, unit: int) -> Tensor:
        # Start earlier fetches first: the same ranks may gather them, and collectives must be in plan order.
        while any(record.unit == unit for record in self._pending):
            self._start(self._pending.popleft())
        while any(half == unit for half, _ in self._half_launched):
            self._launch_second()
        if unit in self._store.resident:
            self._finish_resident(unit)
        elif (copy := self._copies.get(unit)) is not None and not copy.finished:
            if copy.gather is not None:
                self._wait_for_gather(unit, copy.gather)
            self._streams.wait_event(copy.event)
            copy.finished = True
            self._store.states[unit].release_weights(copy.event)
            self._trace.add("fetch", copy.begin, copy.fetch)
        return self.flat(unit)

    def _finish_resident(self, unit: int) -> None:
        if unit in self._refreshing:
            gather = self._refreshing.pop(unit)
            if gather is not None:
                self._wait_for_gather(unit, gather)
        else:
            self._streams.wait_event(self._wait_for_update(unit))

    def _wait_for_gather(self, unit: int, gather: PendingAllGather) -> None:
        with self._heartbeat.waiting(f"gathers unit {unit}"):
            gather.wait()

    def _wait_for_update(self, unit: int) -> Event:
        """Wait until the unit's newest update has been launched. Return the event recorded after the update."""
        return self._heartbeat.join(self._updates.of(unit), self._heartbeat.updates)

    def _start_fetch(self, record: Fetch) -> _Copy:
        begin = time.perf_counter_ns()
        state, slot = self._store.states[record.unit], self._free[self._layout.pool_of(record.unit)].pop()
        updated = self._wait_for_update(record.unit)
        if record.unit in self._unread:
            self._read(record.unit)
        with self._streams.on(Stream.COPY_IN):
            # The slot's last readers and the unit's update run on other streams: these events order the copy after
            # both.
            self._streams.wait_event(slot.free)
            self._streams.wait_event(updated)
            weights = state.compute_weights()
            flat = slot.storage[: len(weights) * self._layout.shards(record.unit)]
            self._count_copy(record.unit, weights)
            if self._layout.shards(record.unit) > 1:
                self._streams.wait_event(self._dropped)
                weights = weights.to(flat.device, non_blocking=True)
            gather = self._gather(record.unit, flat, weights)
            event = self._streams.record_event()
        self._owners[flat.data_ptr()] = record.unit
        return _Copy(slot, flat, weights, gather, event, record, begin)

    def _gather(self, unit: int, flat: Tensor, shard: Tensor) -> PendingAllGather | None:
        """Launch the all-gather of the unit's shards into `flat`, [padded numel], and return it. With several shards,
        `shard` is on the device. If the unit has one shard, copy `shard` and return None."""
        if self._layout.shards(unit) == 1:
            flat.copy_(shard, non_blocking=True)
            return None
        gather = PendingAllGather(self._groups.unit_groups(unit), flat, shard, self._streams, self._trace)
        if not gather.is_launched:
            self._half_launched.append((unit, gather))
        return gather

    def _count_copy(self, unit: int, weights: Tensor) -> None:
        if self._layout.home(unit) != "Device":
            self._trace.count_bytes("h2d", weights.nbytes)

    def _refresh(self, record: Fetch) -> None:
        """Gather a resident copy again after its shards were updated."""
        unit = record.unit
        self._streams.wait_event(self._wait_for_update(unit))
        if unit in self._unread:
            self._read(unit)
        with self._trace.span("fetch", record):
            own = self._store.own_part(unit)
            if self._layout.home(unit) != "Device":
                self._copy_from_home(unit, own)
            self._refreshing[unit] = self._gather(unit, self._store.resident[unit], own)

    def _copy_from_home(self, unit: int, own: Tensor) -> None:
        """Copy a unit's weights from its home to this rank's part of the resident copy."""
        state = self._store.states[unit]
        weights = state.compute_weights()
        own.copy_(weights, non_blocking=True)
        self._count_copy(unit, weights)
        state.release_weights(self._streams.record_event())

    def _pack(self, tensor: Tensor) -> Any:
        storage = tensor.untyped_storage().data_ptr()
        if storage not in self._slot_addresses:
            return pack(tensor) or tensor
        return _Saved(self._owners[storage], int(tensor.storage_offset()), tensor.size(), tensor.stride())

    def _unpack(self, saved: Any) -> Tensor:
        if isinstance(saved, Recomputed):
            return saved.unpack()
        if not isinstance(saved, _Saved):
            assert isinstance(saved, Tensor), "tensors outside the window's slots are saved unchanged"
            return saved
        return self.flat(saved.unit).as_strided(saved.size, saved.stride, saved.offset)


@dataclass(frozen=True)
class _Saved:
    """Placeholder that autograd saves for a view of a streamed unit's weights: the location of the view in the unit. By
    the backward pass, the unit may occupy another slot."""

    unit: int
    offset: int
    size: torch.Size
    stride: tuple[int, ...]

"""A machine that executes everything at once, and records what would order it on a device that works asynchronously.

Each operation of torch is done when it returns. The detector learns which actor would execute it, and after what:

- An operation of a stream happens after all earlier operations of that stream, and after everything that the thread
  that launches it has done or waited for.
- An event has the clock of its stream. A stream or a thread that waits for it has counted what the event has.
- A collective ends after all ranks have launched it. A receive ends after its send, which by then has read all of its
  tensor.

The data of a collective moves once all ranks have launched it, and `Work.wait` always waits for that, also where it is
removed from the ordering: then numbers stay right, and only the detector sees the missing wait.
"""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from tests.unit.trainer.engine.races.support.detector import Actor, Block, Clock, Operation, Place, join
from tests.unit.trainer.engine.races.support.machine import (
    COPIES,
    READS_VALUES,
    UNWRITTEN,
    Call,
    EmulatedEvent,
    Machine,
    labelled,
    tensors_of,
)
from tests.unit.trainer.engine.races.support.network import LIMIT_SECONDS, Network, Part, Transfer


class RecordedEvent(EmulatedEvent):
    """An event with the clock of its stream."""

    def __init__(self, machine: Machine, clock: Clock) -> None:
        super().__init__(machine)
        self._clock = clock

    def wait(self) -> None:
        self._machine.learn(self._clock)

    def order_stream(self) -> None:
        with self._machine.detector.lock:
            join(self._machine.stream.clock, self._clock)

    def query(self) -> bool:
        return True


@dataclass
class RecordingMachine(Machine):
    """Memory of all ranks of one run, and the accesses to it."""

    _blocks: dict[int, tuple[Block, Any]] = field(default_factory=dict)
    """Address of a tensor's memory -> its block, and a reference that ends the entry with the memory."""

    def record_event(self) -> RecordedEvent:
        with self.detector.lock:
            clock = dict(self.stream.clock)
            join(clock, self.thread.actor.clock)
            return RecordedEvent(self, clock)

    def synchronize_device(self) -> None:
        with self.detector.lock:
            for actor in self.rank.actors.values():
                self.learn(actor.clock)

    # Memory.

    def block(self, tensor: Tensor) -> Block | None:
        """Return the block of a tensor's memory; None for a tensor without memory."""
        storage = tensor.untyped_storage()
        address, size = storage.data_ptr(), storage.nbytes()
        if size == 0 or address == 0:  # no elements, or torch's meta device
            return None
        with self.detector.lock:
            if address not in self._blocks:
                place: Place = "pinned" if any(address in pinned for pinned in self.pinned) else "pageable"
                self._keep(tensor, self.detector.allocate(place, size))
            return self._blocks[address][0]

    def place_of(self, tensor: Tensor) -> Place | None:
        block = self.block(tensor)
        return None if block is None else block.place

    def _place_on_device(self, tensor: Tensor) -> Block | None:
        """Say that a new tensor is memory of the device, allocated on the current stream."""
        size = tensor.untyped_storage().nbytes()
        if size == 0:
            return None
        with self.detector.lock:
            block = self.detector.allocate("device", size, self.stream, self.thread.actor.clock)
            self._keep(tensor, block)
            return block

    def _place_on_host(self, tensor: Tensor) -> Block | None:
        with self.detector.lock:
            self._blocks.pop(tensor.untyped_storage().data_ptr(), None)
            return self.block(tensor)

    def _keep(self, tensor: Tensor, block: Block) -> None:
        storage = tensor.untyped_storage()
        address = storage.data_ptr()

        def freed(_: Any) -> None:
            with self.detector.lock:
                known = self._blocks.get(address)
                if known is not None and known[0] is block:
                    del self._blocks[address]
                self.detector.free(block, self.thread.actor.clock if self.is_entered else {})

        self._blocks[address] = block, weakref.ref(storage, freed)

    def pin(self, address: int, size: int) -> None:
        self.pinned.append(range(address, address + size))
        with self.detector.lock:
            if address in self._blocks:
                self._blocks[address][0].place = "pinned"

    def unpin(self, address: int) -> None:
        self.pinned = [pinned for pinned in self.pinned if pinned.start != address]
        with self.detector.lock:
            block, _ = self._blocks[address]
            operation = self.begin_on_host()
            self.detector.access(block, (0, block.size), operation, "the memory's release", is_write=True)

    # Operations.

    def begin_on_stream(self, actor: Actor | None = None) -> Operation:
        """Begin an operation of the current stream, or of an actor that starts after it."""
        self.check_thread()
        with self.detector.lock:
            self.detector.operations += 1
            after = [self.thread.actor.clock, *([] if actor is None else [self.stream.clock])]
            return (actor or self.stream).begin(*after)

    def begin_on_host(self) -> Operation:
        with self.detector.lock:
            self.detector.operations += 1
            return self.thread.actor.begin()

    def access(self, tensor: Tensor, operation: Operation, label: str, *, is_write: bool) -> None:
        """Record an operation's access to a tensor."""
        block = self.block(tensor)
        if block is not None and tensor.numel():
            with self.detector.lock:
                block.users[self.thread.actor.name] = self.thread.actor
                self.detector.access(block, _span(tensor), operation, label, is_write=is_write)

    def access_on_host(self, tensor: Tensor, label: str, *, is_write: bool) -> None:
        super().access_on_host(tensor, label, is_write=is_write)
        self.access(tensor, self.begin_on_host(), labelled(label), is_write=is_write)

    def values(self, tensor: Tensor) -> Any:
        if self.is_on_device(tensor):
            operation = self.begin_on_stream()
            self.access(tensor, operation, labelled("tolist"), is_write=False)
            self.learn(operation.clock)
        else:
            self.access_on_host(tensor, "tolist", is_write=False)
        return tensor.tolist()

    def perform(self, call: Call) -> Any:
        result = call.execute()
        with self.internally():
            self._record(call, result)
        return result

    def _record(self, call: Call, result: Any) -> None:
        known = {_address(tensor) for tensor in call.inputs}
        made = [tensor for tensor in tensors_of(result) if _address(tensor) not in known and _address(tensor)]
        if not call.writes and not made and call.name not in READS_VALUES:
            return  # a view
        with self.detector.lock:
            is_kernel, label, reads = call.is_kernel(self), labelled(call.name), call.reads
            if is_kernel and call.name not in COPIES:
                reads = self._without_host_values(call, label)
            operation = self.begin_on_stream() if is_kernel else self.begin_on_host()
            for tensor in reads:
                self.access(tensor, operation, label, is_write=False)
            for tensor in call.writes:
                self.access(tensor, operation, label, is_write=True)
            for tensor in made:
                block = self._place_on_device(tensor) if is_kernel else self._place_on_host(tensor)
                if block is not None and call.name not in UNWRITTEN:
                    self.access(tensor, operation, label, is_write=True)
            if is_kernel and call.blocks(self):
                self.learn(operation.clock)

    def _without_host_values(self, call: Call, label: str) -> list[Tensor]:
        """Return the inputs on the device. Values of the host are read at once, by the thread."""
        for tensor in call.host_values(self, label):
            self.access(tensor, self.begin_on_host(), label, is_write=False)
        return [tensor for tensor in call.reads if self.is_on_device(tensor) or tensor.numel() == 0]


@dataclass(frozen=True)
class _Launch:
    """A rank's launch of an operation of several ranks."""

    actor: Actor
    """The group's stream on this rank."""
    clock: Clock
    """Clock of the rank's part; counts all ranks' launches once all ranks have launched the operation."""


class RecordingNetwork(Network):
    """Process groups whose operations are ordered by clocks."""

    machine: RecordingMachine

    def launch(
        self, stream: str, transfer: Transfer, inputs: Sequence[Tensor], outputs: Sequence[Tensor], label: str
    ) -> None:
        """Record this rank's part of an operation. The last rank moves the data."""
        rank = self.machine.rank
        operation = self.machine.begin_on_stream(rank.actor(stream))
        for tensor in inputs:
            self.machine.access(tensor, operation, label, is_write=False)
        for tensor in outputs:
            self.machine.access(tensor, operation, label, is_write=True)
        copies = [tensor.detach().clone() for tensor in inputs]
        transfer.parts[rank.number] = Part(copies, [one.detach() for one in outputs])
        transfer.launches[rank.number] = _Launch(rank.actor(stream), operation.clock)
        if transfer.is_launched:
            transfer.move()
            self._join_clocks(transfer)
            self.changed.notify_all()

    def _join_clocks(self, transfer: Transfer) -> None:
        clocks = [dict(launch.clock) for launch in transfer.launches.values()]
        for rank, launch in transfer.launches.items():
            # A send may end before its receive.
            for clock in clocks if rank != transfer.sender else ():
                join(launch.clock, clock)
            join(launch.actor.clock, launch.clock)

    def finish(self, transfer: Transfer, rank: int, *, orders: bool) -> None:
        with self.changed:
            # A send is done for its rank once it is launched: its tensor was copied.
            if rank != transfer.sender and not self.changed.wait_for(
                lambda: transfer.is_launched or self.has_failed, LIMIT_SECONDS
            ):
                raise TimeoutError(f"ranks {transfer.ranks} did not all launch an operation")
            if rank != transfer.sender and not transfer.is_launched:
                raise RuntimeError("another rank has failed")
            if orders:
                join(self.machine.waiting_actor.clock, transfer.launches[rank].clock)

    def is_done(self, transfer: Transfer, rank: int) -> bool:
        if not transfer.is_launched:
            return False
        self.machine.learn(transfer.launches[rank].clock)
        return True


def _span(tensor: Tensor) -> tuple[int, int]:
    """Return the first byte of a tensor in its memory, and the byte after its last one."""
    first = int(tensor.storage_offset())
    last = first + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return first * tensor.itemsize, (last + 1) * tensor.itemsize


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()

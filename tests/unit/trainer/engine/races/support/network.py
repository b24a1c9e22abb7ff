"""Emulated process groups: collectives and messages between ranks that are threads of this process.

Each group has a stream of its own on each rank, as with NCCL: an operation starts after the current stream of the
thread that launches it, and after the group's earlier operations. `Work.wait` makes the current stream wait; without a
device it makes the thread wait, as with gloo.

When the data moves is decided by one of two networks: `recording.py` moves it as soon as all ranks have launched the
operation; `late.py` queues the operation on the group's streams.
"""

import itertools
import threading
from abc import ABC, abstractmethod
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.unit.trainer.engine.races.support.detector import Race
from tests.unit.trainer.engine.races.support.machine import Machine, labelled

LIMIT_SECONDS = 120.0


class EmulatedGroup(dist.ProcessGroup):
    """A process group, from the point of view of one of its ranks."""

    def __init__(self, wire: "Wire", rank: int) -> None:
        super().__init__(wire.ranks.index(rank), len(wire.ranks))
        self.wire = wire


@dataclass(frozen=True)
class Part:
    """One rank's part in an operation."""

    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]
    moved: Callable[[], None] = lambda: None
    """Called once the outputs are written."""


Movement = Callable[[Sequence[Part]], None]
"""Moves the data of an operation between the parts of its ranks, which are in the order of the group."""


@dataclass
class Transfer:
    """An operation of several ranks."""

    ranks: tuple[int, ...]
    movement: Movement
    is_message: bool = False
    parts: dict[int, Part] = field(default_factory=dict)
    """Rank -> its part, from its launch until the data has moved."""
    launches: dict[int, Any] = field(default_factory=dict)
    """Rank -> its launch, as the network records it."""

    @property
    def is_launched(self) -> bool:
        """Whether all ranks have launched the operation."""
        return len(self.launches) == len(self.ranks)

    @property
    def sender(self) -> int | None:
        """Rank that sends a message."""
        return self.ranks[0] if self.is_message else None

    def move(self) -> None:
        """Move the data. Inputs and outputs of a rank may overlap."""
        parts = [self.parts[rank] for rank in self.ranks]
        self.movement([Part([one.clone() for one in part.inputs], part.outputs) for part in parts])
        for part in parts:
            part.moved()
        # A rank must not keep the memory of another rank.
        self.parts.clear()


class EmulatedWork:
    """Replacement for a torch.distributed.Work."""

    def __init__(self, network: "Network", transfer: Transfer, kept: Sequence[Tensor], label: str) -> None:
        self._network, self._transfer, self._rank = network, transfer, network.machine.rank.number
        self._kept: Sequence[Tensor] = kept
        """Tensors that torch keeps until the work was waited for."""
        self._label, self._is_known = label, not transfer.is_message
        """Whether somebody knows that the work is done, so that it may be dropped."""

    def wait(self) -> bool:
        is_removed = self._network.machine.passes_over(depth=1)
        self.finish(orders=not is_removed)
        return True

    def finish(self, *, orders: bool = True) -> None:
        """Wait for the data. `orders`: whether the current stream, or the thread without a device, waits."""
        self._network.finish(self._transfer, self._rank, orders=orders)
        if orders:
            self._is_known, self._kept = True, ()

    def is_completed(self) -> bool:
        self._is_known = self._is_known or self._network.is_done(self._transfer, self._rank)
        return self._is_known

    def __del__(self) -> None:
        if not self._is_known and not self._network.is_over:
            self._network.machine.detector.report(
                Race("abandoned", "", f"the work of {self._label} is dropped while nobody knows whether it is done")
            )
        # Nobody waited: torch's watchdog keeps the tensors until the operation is done.
        self._network.watched.append(self._kept)


@dataclass
class Wire:
    """A group of ranks, as all of them see it."""

    name: str
    ranks: tuple[int, ...]
    launched: Counter[int] = field(default_factory=Counter)
    """Rank -> number of its collectives so far."""
    collectives: dict[int, Transfer] = field(default_factory=dict)
    """Number of a collective -> the collective, until all ranks have launched it."""
    messages: dict[Any, dict[str, deque[Transfer]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(deque))
    )
    """(source, target, tag) -> end of a message -> messages that only this end has launched."""


class Network(ABC):
    """All groups of a machine, and replacements for the functions of torch.distributed that the engine calls."""

    def __init__(self, machine: Machine, world: int) -> None:
        self.machine, self._world = machine, tuple(range(world))
        self.watched: list[Sequence[Tensor]] = []
        self.is_over = False
        """Whether all ranks have ended their work."""
        self.changed = threading.Condition(machine.detector.lock)
        self.has_failed, self._operations = False, itertools.count()
        self._wires: dict[tuple[Any, ...], Wire] = {}
        self._made: Counter[tuple[int, tuple[int, ...]]] = Counter()

    @abstractmethod
    def launch(
        self, stream: str, transfer: Transfer, inputs: Sequence[Tensor], outputs: Sequence[Tensor], label: str
    ) -> None:
        """Launch this rank's part of an operation. `stream`: name of the stream that executes it."""

    @abstractmethod
    def finish(self, transfer: Transfer, rank: int, *, orders: bool) -> None:
        """Wait for the data of a rank's part. `orders`: whether the current stream, or the thread without a device,
        waits."""

    @abstractmethod
    def is_done(self, transfer: Transfer, rank: int) -> bool:
        """Return whether this thread can know that a rank's part is done."""

    def fail(self) -> None:
        """End all waits of other ranks for a rank that has failed."""
        with self.changed:
            self.has_failed = True
            self.changed.notify_all()

    # Groups.

    def new_group(self, ranks: Sequence[int], **_: Any) -> object:
        return self._group([*ranks])

    def split_group(self, *, split_ranks: Sequence[Sequence[int]], **_: Any) -> object:
        own = self.machine.rank.number
        return next((self._group(ranks) for ranks in split_ranks if own in ranks), None)

    def destroy_process_group(self, *_: Any) -> None:  # noqa: B027
        pass

    def _group(self, ranks: Sequence[int]) -> object:
        own, members = self.machine.rank.number, tuple(ranks)
        if own not in members:
            return dist.GroupMember.NON_GROUP_MEMBER
        with self.changed:
            self._made[own, members] += 1
            return EmulatedGroup(self._wire(members, self._made[own, members]), own)

    def _wire(self, members: tuple[int, ...], number: int) -> Wire:
        name = f"group {','.join(map(str, members))} no. {number}"
        return self._wires.setdefault((members, number), Wire(name, members))

    def _wire_of(self, group: Any) -> Wire:
        if group is None:
            return self._wire(self._world, 0)
        wire: Wire = group.wire
        return wire

    # Collectives.

    def all_reduce(self, tensor: Tensor, *, group: Any = None, async_op: bool = False) -> EmulatedWork | None:
        def move(parts: Sequence[Part]) -> None:
            total: Any = sum(part.inputs[0] for part in parts)
            for part in parts:
                part.outputs[0].copy_(total)

        return self._collective("all_reduce", group, [tensor], [tensor], move, async_op)

    def reduce_scatter_tensor(
        self, output: Tensor, tensor: Tensor, *, group: Any = None, async_op: bool = False
    ) -> EmulatedWork | None:
        def move(parts: Sequence[Part]) -> None:
            total: Any = sum(part.inputs[0] for part in parts)
            for part, own in zip(parts, total.chunk(len(parts)), strict=True):
                part.outputs[0].copy_(own)

        return self._collective("reduce_scatter", group, [tensor], [output], move, async_op)

    def all_gather_into_tensor(
        self, output: Tensor, tensor: Tensor, *, group: Any = None, async_op: bool = False
    ) -> EmulatedWork | None:
        def move(parts: Sequence[Part]) -> None:
            whole = torch.cat([part.inputs[0] for part in parts])
            for part in parts:
                part.outputs[0].copy_(whole)

        return self._collective("all_gather", group, [tensor], [output], move, async_op)

    def all_to_all_single(
        self,
        output: Tensor,
        tensor: Tensor,
        _: Sequence[int] | None = None,
        input_sizes: Sequence[int] | None = None,
        *,
        group: Any = None,
        async_op: bool = False,
    ) -> EmulatedWork | None:
        count = len(self._wire_of(group).ranks)
        sent = tensor.chunk(count) if input_sizes is None else tensor.split([*input_sizes])

        def move(parts: Sequence[Part]) -> None:
            for target, part in enumerate(parts):
                part.outputs[0].copy_(torch.cat([source.inputs[target] for source in parts]))

        return self._collective("all_to_all", group, sent, [output], move, async_op)

    def _collective(
        self,
        name: str,
        group: Any,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        movement: Movement,
        is_asynchronous: bool,
    ) -> EmulatedWork | None:
        wire, own, label = self._wire_of(group), self.machine.rank.number, labelled(name)
        with self.changed, self.machine.internally():
            number = wire.launched[own]
            wire.launched[own] += 1
            transfer = wire.collectives.setdefault(number, Transfer(wire.ranks, movement))
            self.launch(self._stream(wire), transfer, inputs, outputs, label)
            if transfer.is_launched:
                del wire.collectives[number]
        return self._work(transfer, [*inputs, *outputs], label, is_asynchronous)

    # Messages.

    def isend(self, tensor: Tensor, target: int, group: Any = None, tag: int = 0) -> EmulatedWork:
        own = self.machine.rank.number
        return self._message("send", (own, target), tensor, group, tag)

    def irecv(self, tensor: Tensor, source: int, group: Any = None, tag: int = 0) -> EmulatedWork:
        own = self.machine.rank.number
        return self._message("receive", (source, own), tensor, group, tag)

    def recv(self, tensor: Tensor, source: int, group: Any = None, tag: int = 0) -> None:
        self.irecv(tensor, source, group, tag).finish()

    def _message(self, end: str, ends: tuple[int, int], tensor: Tensor, group: Any, tag: int) -> EmulatedWork:
        wire, label = self._wire_of(group), labelled(end)
        with self.changed, self.machine.internally():
            # NCCL ignores tags.
            waiting = wire.messages[(*ends, 0 if self.machine.rank.has_device else tag)]
            other = "receive" if end == "send" else "send"
            transfer = waiting[other].popleft() if waiting[other] else Transfer(ends, _deliver, is_message=True)
            if not transfer.launches:
                waiting[end].append(transfer)
            tensors = ([tensor], []) if end == "send" else ([], [tensor])
            self.launch(self._stream(wire), transfer, *tensors, label)
        return EmulatedWork(self, transfer, [tensor], label)

    # Both.

    def _stream(self, wire: Wire) -> str:
        # Without a device, gloo's threads work on several operations of a group at once.
        return wire.name if self.machine.rank.has_device else f"{wire.name}, operation {next(self._operations)}"

    def _work(
        self, transfer: Transfer, tensors: Sequence[Tensor], label: str, is_asynchronous: bool
    ) -> EmulatedWork | None:
        work = EmulatedWork(self, transfer, tensors, label)
        if is_asynchronous:
            return work
        work.finish()
        return None


def _deliver(parts: Sequence[Part]) -> None:
    sent, received = parts
    received.outputs[0].copy_(sent.inputs[0])

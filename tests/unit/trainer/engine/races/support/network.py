"""Emulated process groups: collectives and messages between ranks that are threads of this process.

Each group has a stream of its own on each rank, as with NCCL: an operation starts after the current stream of the
thread that launches it, and after the group's earlier operations. `Work.wait` makes the current stream wait; without a
device it makes the thread wait, as with gloo. A collective ends after all ranks have launched it. A receive ends after
its send, which by then has read all of its tensor.

The data moves once all ranks have launched the operation, and `Work.wait` always waits for that, also where it is
removed from the ordering: then numbers stay right, and only the detector sees the missing wait.
"""

import itertools
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.unit.trainer.engine.races.support.detector import Actor, Clock, Race, join
from tests.unit.trainer.engine.races.support.machine import Machine, labelled

_LIMIT_SECONDS = 120.0


class EmulatedGroup(dist.ProcessGroup):
    """A process group, from the point of view of one of its ranks."""

    def __init__(self, wire: "_Wire", rank: int) -> None:
        super().__init__(wire.ranks.index(rank), len(wire.ranks))
        self.wire = wire


@dataclass(frozen=True)
class _Part:
    """One rank's part in an operation."""

    inputs: Sequence[Tensor]
    """Copies of what the rank sends."""
    outputs: Sequence[Tensor]
    clock: Clock
    """Clock of the launch."""
    actor: Actor
    """The group's stream on this rank."""


Movement = Callable[[Sequence[_Part]], None]
"""Moves the data of an operation between the parts of its ranks, which are in the order of the group."""


@dataclass
class _Transfer:
    """An operation of several ranks."""

    ranks: tuple[int, ...]
    movement: Movement
    parts: dict[int, _Part] = field(default_factory=dict)
    """Rank -> its part."""
    ends: dict[int, Clock] = field(default_factory=dict)
    """Rank -> clock of the end, once all ranks have launched the operation and the parts are gone."""
    is_message: bool = False


class EmulatedWork:
    """Replacement for a torch.distributed.Work."""

    def __init__(self, network: "Network", transfer: _Transfer, kept: Sequence[Tensor], label: str) -> None:
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
        clock = self._network.await_end(self._transfer, self._rank)
        if orders:
            machine = self._network.machine
            with machine.detector.lock:
                join(machine.waiting_actor.clock, clock)
            self._is_known, self._kept = True, ()

    def is_completed(self) -> bool:
        if self._rank not in self._transfer.ends:
            return False
        self._network.machine.learn(self._transfer.ends[self._rank])
        self._is_known = True
        return True

    def __del__(self) -> None:
        if not self._is_known and not self._network.is_over:
            self._network.machine.detector.report(
                Race("abandoned", "", f"the work of {self._label} is dropped while nobody knows whether it is done")
            )
        # Nobody waited: torch's watchdog keeps the tensors until the operation is done.
        self._network.watched.append(self._kept)


@dataclass
class _Wire:
    """A group of ranks, as all of them see it."""

    name: str
    ranks: tuple[int, ...]
    launched: Counter[int] = field(default_factory=Counter)
    """Rank -> number of its collectives so far."""
    collectives: dict[int, _Transfer] = field(default_factory=dict)
    """Number of a collective -> the collective, until all ranks have launched it."""
    messages: dict[Any, dict[str, deque[_Transfer]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(deque))
    )
    """(source, target, tag) -> end of a message -> messages that only this end has launched."""


class Network:
    """All groups of a machine, and replacements for the functions of torch.distributed that the engine calls."""

    def __init__(self, machine: Machine, world: int) -> None:
        self.machine, self._world = machine, tuple(range(world))
        self.watched: list[Sequence[Tensor]] = []
        self.is_over = False
        """Whether all ranks have ended their work."""
        self._changed = threading.Condition(machine.detector.lock)
        self._failed, self._operations = False, itertools.count()
        self._wires: dict[tuple[Any, ...], _Wire] = {}
        self._made: Counter[tuple[int, tuple[int, ...]]] = Counter()

    def fail(self) -> None:
        """End all waits of other ranks for a rank that has failed."""
        with self._changed:
            self._failed = True
            self._changed.notify_all()

    # Groups.

    def new_group(self, ranks: Sequence[int], **_: Any) -> object:
        return self._group([*ranks])

    def split_group(self, *, split_ranks: Sequence[Sequence[int]], **_: Any) -> object:
        own = self.machine.rank.number
        return next((self._group(ranks) for ranks in split_ranks if own in ranks), None)

    def destroy_process_group(self, *_: Any) -> None:
        pass

    def _group(self, ranks: Sequence[int]) -> object:
        own, members = self.machine.rank.number, tuple(ranks)
        if own not in members:
            return dist.GroupMember.NON_GROUP_MEMBER
        with self._changed:
            self._made[own, members] += 1
            return EmulatedGroup(self._wire(members, self._made[own, members]), own)

    def _wire(self, members: tuple[int, ...], number: int) -> _Wire:
        name = f"group {','.join(map(str, members))} no. {number}"
        return self._wires.setdefault((members, number), _Wire(name, members))

    def _wire_of(self, group: Any) -> _Wire:
        if group is None:
            return self._wire(self._world, 0)
        wire: _Wire = group.wire
        return wire

    # Collectives.

    def all_reduce(self, tensor: Tensor, *, group: Any = None, async_op: bool = False) -> EmulatedWork | None:
        def move(parts: Sequence[_Part]) -> None:
            total: Any = sum(part.inputs[0] for part in parts)
            for part in parts:
                part.outputs[0].copy_(total)

        return self._collective("all_reduce", group, [tensor], [tensor], move, async_op)

    def reduce_scatter_tensor(
        self, output: Tensor, tensor: Tensor, *, group: Any = None, async_op: bool = False
    ) -> EmulatedWork | None:
        def move(parts: Sequence[_Part]) -> None:
            total: Any = sum(part.inputs[0] for part in parts)
            for part, own in zip(parts, total.chunk(len(parts)), strict=True):
                part.outputs[0].copy_(own)

        return self._collective("reduce_scatter", group, [tensor], [output], move, async_op)

    def all_gather_into_tensor(
        self, output: Tensor, tensor: Tensor, *, group: Any = None, async_op: bool = False
    ) -> EmulatedWork | None:
        def move(parts: Sequence[_Part]) -> None:
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

        def move(parts: Sequence[_Part]) -> None:
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
        with self._changed, self.machine.internally():
            number = wire.launched[own]
            wire.launched[own] += 1
            transfer = wire.collectives.setdefault(number, _Transfer(wire.ranks, movement))
            self._launch(wire, transfer, inputs, outputs, label)
            if transfer.ends:
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
        with self._changed, self.machine.internally():
            # NCCL ignores tags.
            waiting = wire.messages[(*ends, 0 if self.machine.rank.has_device else tag)]
            other = "receive" if end == "send" else "send"
            transfer = waiting[other].popleft() if waiting[other] else _Transfer(ends, _deliver, is_message=True)
            if not transfer.parts:
                waiting[end].append(transfer)
            tensors = ([tensor], []) if end == "send" else ([], [tensor])
            self._launch(wire, transfer, *tensors, label)
        return EmulatedWork(self, transfer, [tensor], label)

    # Both.

    def _launch(
        self, wire: _Wire, transfer: _Transfer, inputs: Sequence[Tensor], outputs: Sequence[Tensor], label: str
    ) -> None:
        """Record one rank's part of an operation. The last rank moves the data."""
        actor = self._actor(wire)
        operation = self.machine.begin_on_stream(actor)
        for tensor in inputs:
            self.machine.access(tensor, operation, label, is_write=False)
        for tensor in outputs:
            self.machine.access(tensor, operation, label, is_write=True)
        copies = [tensor.detach().clone() for tensor in inputs]
        part = _Part(copies, [one.detach() for one in outputs], operation.clock, actor)
        transfer.parts[self.machine.rank.number] = part
        if len(transfer.parts) == len(transfer.ranks):
            transfer.movement([transfer.parts[rank] for rank in transfer.ranks])
            for rank, part in transfer.parts.items():
                clock = dict(part.clock)
                # A send may end before its receive.
                if not (transfer.is_message and rank == transfer.ranks[0]):
                    for other in transfer.parts.values():
                        join(clock, other.clock)
                transfer.ends[rank] = clock
                join(part.actor.clock, clock)
            # A rank must not keep the memory of another rank.
            transfer.parts.clear()
            self._changed.notify_all()

    def _actor(self, wire: _Wire) -> Actor:
        # Without a device, gloo's threads work on several operations of a group at once.
        operation = "" if self.machine.rank.has_device else f", operation {next(self._operations)}"
        return self.machine.rank.actor(wire.name + operation)

    def _work(
        self, transfer: _Transfer, tensors: Sequence[Tensor], label: str, is_asynchronous: bool
    ) -> EmulatedWork | None:
        work = EmulatedWork(self, transfer, tensors, label)
        if is_asynchronous:
            return work
        work.finish()
        return None

    def await_end(self, transfer: _Transfer, rank: int) -> Clock:
        """Wait until all ranks have launched an operation. Return the clock of this rank's end."""
        # A send is done for its rank once it is launched: its tensor was copied.
        with self._changed:
            if transfer.is_message and rank == transfer.ranks[0] and not transfer.ends:
                return transfer.parts[rank].clock
            if not self._changed.wait_for(lambda: rank in transfer.ends or self._failed, _LIMIT_SECONDS):
                raise TimeoutError(f"ranks {transfer.ranks} did not all launch an operation")
            if rank not in transfer.ends:
                raise RuntimeError("another rank has failed")
            return transfer.ends[rank]


def _deliver(parts: Sequence[_Part]) -> None:
    sent, received = parts
    received.outputs[0].copy_(sent.inputs[0])

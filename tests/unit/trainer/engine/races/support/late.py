"""A machine that queues the work of its devices and executes it later, in an order that a schedule chooses.

Launching an operation on memory of the device allocates its result and appends an entry to the queue of the current
stream. Events, waits for events and operations of process groups are entries, too. An entry can be executed once it is
the first of its queue, the events that it waits for have passed, and all ranks have reached the collective that it
belongs to. So the order is any that a real device may choose, and numbers are right only if the engine has asked for
the order that it needs:

- A *schedule* chooses which of the entries that can be executed are, after each launch. Everything else is executed
  when a thread waits for it: an event, a value, a blocking copy, the whole device.
- A copy to or from pinned memory reads or writes that memory when it is executed; the thread may have changed it.
- Memory of the device that is freed goes to the next tensor that is allocated on the same stream and fits. Whichever
  tensor is allocated there next, that stream then overwrites all memory that was freed since the last allocation with
  0xFF (NaN, or -1): the allocator might have given any of it away. New memory holds the same bytes.
- `queues` hardware queues serve all streams of a device. Streams that share a queue wait for each other. If nothing can
  be executed while a thread waits, and nothing is launched for `patience` seconds, the run ends with `Stuck`, which
  says what heads each queue and what it waits for.

The shape of a result is found by executing the operation on zeros. Executed at once are operations on memory of the
host, views, and operations whose shape depends on values, after the wait that they are on a device, too (`nonzero`, an
index of booleans). Not shown are therefore: memory that kernels use beside their arguments and results, two kernels
that are halfway through at the same time, and memory in which freed tensors are merged or split. The threads of the
engine are real, so a seed repeats the draws of a schedule, and not how threads interleave.
"""

import threading
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
from pseudoreal_trainer.engine.ranks.streams import Stream
from torch import Tensor

from tests.unit.trainer.engine.races.support.detector import Place, Race
from tests.unit.trainer.engine.races.support.machine import (
    COMPUTE,
    COPIES,
    READS_VALUES,
    UNWRITTEN,
    Call,
    EmulatedEvent,
    Machine,
    Rank,
    labelled,
    tensors_of,
)
from tests.unit.trainer.engine.races.support.network import Network, Part, Transfer

POISON = 0xFF
_ROUNDING = 512
"""Torch's allocator rounds sizes up to a multiple of this many bytes."""
_INDEXED = {"index", "index_put_", "_index_put_impl_", "_unsafe_index"}
"""Operations that count the elements of an index of booleans."""


class Stuck(AssertionError):
    """Raised if a thread waits for work that never can be executed."""


# Queues.


@dataclass(eq=False)
class Entry:
    """An operation, an event, or a wait in the queue of a stream."""

    label: str
    stream: str
    queue: "_Queue"
    work: Callable[[], None] | None = None
    after: tuple["Entry", ...] = ()
    """Entries of other streams that come first."""
    transfer: Transfer | None = None
    """Operation of several ranks that this entry is a rank's part of."""
    host_memory: tuple[Tensor, ...] = ()
    """Memory of the host that the entry reads or writes."""
    is_done: bool = False

    @property
    def pending(self) -> list["Entry"]:
        """Entries that come first and are not done."""
        return [entry for entry in self.after if not entry.is_done]

    @property
    def partners(self) -> list["Entry"]:
        """Entries that are executed together with this one, as far as they are launched."""
        return [self] if self.transfer is None else [*self.transfer.launches.values()]

    @property
    def is_head(self) -> bool:
        return self.queue.entries[0] is self

    @property
    def has_arrived(self) -> bool:
        """Whether nothing of its own rank is before the entry."""
        return self.is_head and not self.pending

    @property
    def can_run(self) -> bool:
        if self.transfer is None:
            return self.has_arrived
        return self.transfer.is_launched and all(partner.has_arrived for partner in self.partners)


@dataclass(eq=False)
class _Queue:
    """A hardware queue of a device: executes one entry after another."""

    name: str
    entries: deque[Entry] = field(default_factory=deque)


# Schedules.


class Schedule(ABC):
    """Chooses what is executed before anybody waits for it."""

    @abstractmethod
    def choose(self, ready: Sequence[Entry]) -> Entry | None:
        """Return one of the entries that can be executed; None: enough for now."""

    @property
    @abstractmethod
    def name(self) -> str: ...


class Latest(Schedule):
    """Executes an entry when somebody waits for it."""

    name = "latest"

    def choose(self, ready: Sequence[Entry]) -> Entry | None:  # noqa: ARG002
        return None


class Earliest(Schedule):
    """Executes everything as soon as possible."""

    name = "earliest"

    def choose(self, ready: Sequence[Entry]) -> Entry | None:
        return next(iter(ready), None)


class Starving(Schedule):
    """Executes everything as soon as possible, apart from a stream whose entries somebody must wait for."""

    def __init__(self, starved: str) -> None:
        """`starved`: name of the stream, on all ranks; or its beginning, for streams of process groups."""
        self._starved = starved

    @property
    def name(self) -> str:
        return f"{self._starved} starves"

    def choose(self, ready: Sequence[Entry]) -> Entry | None:
        return next((entry for entry in ready if not entry.stream.startswith(self._starved)), None)


class Drawn(Schedule):
    """Executes what chance says. Some streams are far behind others, and which ones changes from time to time."""

    _PERIOD = 60

    def __init__(self, seed: int) -> None:
        self._seed, self._chance = seed, Random(seed)
        self._weights: dict[str, float] = {}
        self._left, self._pace = 0, 0.0

    @property
    def name(self) -> str:
        return f"seed {self._seed}"

    def choose(self, ready: Sequence[Entry]) -> Entry | None:
        if self._left == 0:
            self._left, self._pace = self._PERIOD, self._chance.choice((0.2, 0.5, 0.8, 0.95))
            self._weights.clear()
        self._left -= 1
        if not ready or self._chance.random() > self._pace:
            return None
        weights = [self._weight(f"{entry.stream} of {entry.queue.name}") for entry in ready]
        found = self._chance.choices(ready, weights)[0]
        return found if self._chance.random() < self._weight(f"{found.stream} of {found.queue.name}") else None

    def _weight(self, stream: str) -> float:
        return self._weights.setdefault(stream, self._chance.choice((0.01, 1.0)))


# Memory.


@dataclass(eq=False)
class _Memory:
    """Memory that the allocator got from the device, and gives to one tensor after another."""

    content: Tensor
    """Bytes, [a multiple of the rounding]."""
    owner: "_Allocation | None" = None

    def __post_init__(self) -> None:
        self.array = self.content.numpy()

    def poison(self) -> None:
        # The next owner may already have written on another stream, which the device allows.
        if self.owner is None or not self.owner.is_written:
            self.content.fill_(POISON)


@dataclass(eq=False)
class _Allocation:
    """Memory of the device, while a tensor has it."""

    memory: _Memory
    rank: int
    stream: str
    size: int
    """Size in bytes, as torch's allocator counts it."""
    is_written: bool = False
    """Whether an operation that was executed has written to it."""
    reference: Any = None
    """Reference that frees the memory with the tensor."""


@dataclass(frozen=True)
class _Result:
    """Shape and type of a result."""

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]


class LateEvent(EmulatedEvent):
    """An event that has passed once its entry is executed."""

    _machine: "LateMachine"

    def __init__(self, machine: "LateMachine", entry: Entry) -> None:
        super().__init__(machine)
        self._entry = entry

    def wait(self) -> None:
        self._machine.await_entry(self._entry)

    def order_stream(self) -> None:
        self._machine.order_stream(self._entry)

    def query(self) -> bool:
        self._machine.advance()
        return self._entry.is_done


@dataclass
class LateMachine(Machine):
    """Queues and memory of all devices of one run."""

    schedule: Schedule = field(default_factory=Latest)
    queues: int = 32
    """Hardware queues of a device."""
    patience: float = 60.0
    """Seconds without a launch after which a thread that waits for work that cannot be executed gives up."""
    peaks: dict[int, int] = field(default_factory=dict)
    """Rank -> peak of the bytes that are allocated on its device."""
    executed: int = 0
    """Number of entries that were executed."""
    _queues: dict[tuple[int, int | str], _Queue] = field(default_factory=dict)
    """(rank, number of the hardware queue, or name of a stream without a device) -> queue."""
    _queue_of: dict[tuple[int, str], int] = field(default_factory=dict)
    """(rank, stream) -> number of its hardware queue."""
    _allocations: dict[int, _Allocation] = field(default_factory=dict)
    """Address of a tensor's memory -> its allocation on a device."""
    _free: dict[tuple[int, str], dict[int, list[_Memory]]] = field(default_factory=dict)
    """(rank, stream) -> bytes -> free memory, newest last."""
    _unpoisoned: dict[tuple[int, str], list[_Memory]] = field(default_factory=dict)
    """(rank, stream) -> memory that was freed since the last allocation."""
    _allocated: dict[int, int] = field(default_factory=dict)
    """Rank -> bytes that are allocated on its device."""
    _results: dict[Any, Any] = field(default_factory=dict)
    """Operation with the shapes of its arguments -> shapes of its results."""
    _launches: int = 0
    """Number of entries that were launched."""
    _has_failed: bool = False
    _is_over: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._changed = threading.Condition(self.detector.lock)

    def new_rank(self, number: int) -> Rank:
        rank = super().new_rank(number)
        for stream in (COMPUTE, *(stream.value for stream in Stream)) if rank.has_device else ():
            self._create_stream(number, stream)
        return rank

    def _create_stream(self, rank: int, name: str) -> int:
        """Return the number of the stream's hardware queue. A device serves streams by its queues in the order in which
        the streams are created."""
        count = sum(of_rank == rank for of_rank, _ in self._queue_of)
        return self._queue_of.setdefault((rank, name), count % self.queues)

    def fail(self) -> None:
        """End all waits, because a rank has failed."""
        with self._changed:
            self._has_failed = True
            self._changed.notify_all()

    def end(self) -> None:
        """Execute what is left after the last thread has ended."""
        with self._changed, self.internally():
            self._execute_ready()
            self._is_over = True
            if any(queue.entries for queue in self._queues.values()):
                raise Stuck(f"work is left that never can be executed\n{self._report()}")

    # Launches.

    def launch(
        self,
        label: str,
        work: Callable[[], None] | None = None,
        *,
        after: tuple[Entry, ...] = (),
        transfer: Transfer | None = None,
        stream: str | None = None,
        host_memory: tuple[Tensor, ...] = (),
    ) -> Entry:
        """Append an entry to the queue of a stream, the current one by default."""
        with self._changed:
            name = self.thread.stream if stream is None else stream
            entry = Entry(label, name, self._queue(name), work, after, transfer, host_memory)
            if transfer is not None:
                transfer.launches[self.rank.number] = entry
            self._append(entry)
            self.advance()
            return entry

    def _queue(self, stream: str) -> _Queue:
        rank = self.rank
        if not rank.has_device:
            return self._queues.setdefault((rank.number, stream), _Queue(f"of rank {rank.number}"))
        number = self._create_stream(rank.number, stream)
        return self._queues.setdefault((rank.number, number), _Queue(f"queue {number} of rank {rank.number}"))

    def _append(self, entry: Entry) -> None:
        entry.queue.entries.append(entry)
        self._launches += 1
        self._changed.notify_all()

    def record_event(self) -> LateEvent:
        return LateEvent(self, self.launch("an event"))

    def order_stream(self, entry: Entry) -> None:
        """Make the current stream wait for an entry."""
        self.launch(f"a wait, {labelled('called')}", after=(entry,))

    # Execution.

    def advance(self) -> None:
        """Execute what the schedule chooses."""
        with self._changed, self.internally():
            if isinstance(self.schedule, Latest):
                return
            while (entry := self.schedule.choose([*self._ready()])) is not None:
                self._execute(entry)

    def await_entry(self, entry: Entry) -> None:
        """Execute what the entry needs, and wait for other threads to launch it."""
        with self._changed, self.internally():
            while not entry.is_done:
                launches, needed = self._launches, self._needed_by(entry)
                if needed is not None:
                    self._execute(needed)
                elif self._has_failed:
                    raise RuntimeError("another rank has failed")
                elif not self._wait_for_launch(launches, entry) and not self._execute_ready():
                    raise Stuck(f"{entry.label} on {entry.stream} never can be executed\n{self._report()}")

    def _wait_for_launch(self, launches: int, entry: Entry) -> bool:
        """Wait until there are more launches, or the entry is done. Return whether this was in time."""
        return self._changed.wait_for(
            lambda: self._launches != launches or entry.is_done or self._has_failed, self.patience
        )

    def synchronize_device(self) -> None:
        rank = self.rank.number
        for (of_rank, _), queue in [*self._queues.items()]:
            if of_rank == rank and queue.entries:
                self.await_entry(queue.entries[-1])

    def _ready(self) -> Iterator[Entry]:
        for queue in [*self._queues.values()]:
            if queue.entries and queue.entries[0].can_run:
                yield queue.entries[0]

    def _execute_ready(self) -> bool:
        """Execute everything that can be executed. Return whether there was something."""
        before = self.executed
        while (entry := next(self._ready(), None)) is not None:
            self._execute(entry)
        return self.executed > before

    def _needed_by(self, entry: Entry) -> Entry | None:
        """Return an entry that can be executed and that `entry` waits for."""
        waiting, seen = [entry], {entry}
        while waiting:
            head = waiting.pop().queue.entries[0]
            if head.can_run:
                return head
            for needed in (head, *head.pending, *head.partners):
                if needed not in seen and not needed.is_done:
                    seen.add(needed)
                    waiting.extend([needed, *needed.pending])
        return None

    def _execute(self, entry: Entry) -> None:
        try:
            if entry.transfer is not None:
                entry.transfer.move()
            elif entry.work is not None:
                entry.work()
        except Exception as error:  # as a kernel that traps, for instance at an index that it does not find
            self.detector.report(Race("fault", "", f"{entry.label}: {error}"))
        for done in entry.partners:
            done.is_done, done.work, done.after, done.transfer, done.host_memory = True, None, (), None, ()
            done.queue.entries.popleft()
            self.executed += 1
        self._changed.notify_all()

    def _report(self) -> str:
        lines = [_described(queue) for queue in self._queues.values() if queue.entries]
        return "\n".join([f"{self.queues} hardware queues for each device", *lines])

    # Memory.

    def place_of(self, tensor: Tensor) -> Place | None:
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address == 0 or storage.nbytes() == 0:
            return None
        with self.detector.lock:
            if address in self._allocations:
                return "device"
            return "pinned" if any(address in pinned for pinned in self.pinned) else "pageable"

    def pin(self, address: int, size: int) -> None:
        with self.detector.lock:
            self.pinned.append(range(address, address + size))

    def unpin(self, address: int) -> None:
        with self.detector.lock:
            released = next(pinned for pinned in self.pinned if pinned.start == address)
            self.pinned.remove(released)
            for entry in [entry for queue in self._queues.values() for entry in queue.entries]:
                if any(memory.data_ptr() in released for memory in entry.host_memory):
                    self.misuse(f"pinned memory is released before {entry.label} is executed")

    def _allocate(self, result: _Result) -> Tensor:
        """Return a tensor on the device, allocated on the current stream."""
        size = _bytes_of(result)
        if size == 0:
            return torch.empty_strided(result.size, result.stride, dtype=result.dtype)
        rank, stream = self.rank.number, self.thread.stream
        rounded = -(-size // _ROUNDING) * _ROUNDING
        self._poison_freed(rank, stream)
        memory = self._take(rank, stream, rounded)
        allocation = memory.owner = _Allocation(memory, rank, stream, rounded)
        self._allocated[rank] = self._allocated.get(rank, 0) + rounded
        self.peaks[rank] = max(self.peaks.get(rank, 0), self._allocated[rank])
        # A storage of its own, which shares the memory: its end is the end of the allocation, though work that is
        # queued may still use the memory.
        storage = torch.frombuffer(memory.array, dtype=torch.uint8, count=size).untyped_storage()
        self._allocations[storage.data_ptr()] = allocation
        address = storage.data_ptr()
        allocation.reference = weakref.ref(storage, lambda _: self._freed(address, allocation))
        return torch.empty(0, dtype=result.dtype).set_(storage, 0, result.size, result.stride)

    def _take(self, rank: int, stream: str, size: int) -> _Memory:
        free = self._free.setdefault((rank, stream), {})
        best = min((length for length, memories in free.items() if size <= length <= 2 * size and memories), default=0)
        return free[best].pop() if best else _Memory(torch.full((size,), POISON, dtype=torch.uint8))

    def _freed(self, address: int, allocation: _Allocation) -> None:
        with self._changed:
            if self._is_over:
                return
            del self._allocations[address]
            self._allocated[allocation.rank] -= allocation.size
            allocation.memory.owner = None
            of_stream = allocation.rank, allocation.stream
            self._free[of_stream].setdefault(len(allocation.memory.array), []).append(allocation.memory)
            self._unpoisoned.setdefault(of_stream, []).append(allocation.memory)

    def _poison_freed(self, rank: int, stream: str) -> None:
        """Overwrite all memory of the stream that was freed since its last allocation: the allocator may give any of it
        to the next tensor, whose first writer may be the stream itself, at once."""
        for memory in self._unpoisoned.pop((rank, stream), ()):
            self._append(Entry("memory that was freed", stream, self._queue(stream), memory.poison))

    def alias(self, tensor: Tensor) -> Tensor:
        """Return the tensor for an entry: it shares the memory of a tensor on the device, but does not keep it."""
        allocation = self._allocations.get(tensor.untyped_storage().data_ptr())
        if allocation is None:
            return tensor.detach()
        storage = allocation.memory.content.untyped_storage()
        return torch.empty(0, dtype=tensor.dtype).set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())

    def writing(self, tensors: Sequence[Tensor]) -> Callable[[], None]:
        """Return a function that says that the tensors were written."""
        allocations = [self._allocations.get(tensor.untyped_storage().data_ptr()) for tensor in tensors]

        def say() -> None:
            for allocation in allocations:
                if allocation is not None:
                    allocation.is_written = True

        return say

    # Operations.

    def perform(self, call: Call) -> Any:
        if not call.is_kernel(self):
            return call.execute()
        self.check_thread()
        with self.internally():
            label = labelled(call.name)
            if call.name in COPIES and any(one.numel() and not self.is_on_device(one) for one in call.inputs):
                return self._copy(call, label)
            call.host_values(self, label)
            if call.name in READS_VALUES or _counts(call):
                return self._execute_now(call, label)
            results = [] if call.writes else self._results_of(call)
            if results is None:
                return call.execute()
            with self._changed:
                made = _replaced(results, _Result, self._allocate)
                if call.name not in UNWRITTEN:
                    self._launch_kernel(call, label, [*tensors_of(made)])
                return _returned(call, made)

    def _launch_kernel(self, call: Call, label: str, made: Sequence[Tensor]) -> None:
        """Launch a kernel that writes to the tensors in `made`, or to its arguments."""
        # The entry must not keep the call, whose tensors would then live until it is executed.
        function, (args, kwargs) = call.function, self._arguments_of(call)
        targets, written = [self.alias(tensor) for tensor in made], self.writing([*made, *call.writes])

        def work() -> None:
            found = function(*args, **kwargs)
            for target, source in zip(targets, tensors_of(found), strict=False):
                target.copy_(source)
            written()

        self.launch(label, work)

    def _arguments_of(self, call: Call) -> tuple[Any, Any]:
        """Return the arguments of a call for its entry. Values of the host are those of this moment."""

        def replaced(tensor: Tensor) -> Tensor:
            return self.alias(tensor) if self.is_on_device(tensor) else tensor.detach().clone()

        args = _replaced(call.args, Tensor, replaced)
        return args, {name: _replaced(value, Tensor, replaced) for name, value in call.kwargs.items()}

    def _results_of(self, call: Call) -> Any:
        """Return the results' shapes, in the place of tensors; None: a view, or something else without memory of its
        own."""
        key = _key(call)
        with self.detector.lock:
            if key not in self._results:
                self._results[key] = _tried(call)
            return self._results[key]

    def _copy(self, call: Call, label: str) -> Any:
        """Launch a copy between host and device."""
        target, source = call.args[:2]
        blocks, to, from_ = call.blocks(self), self.alias(target), self.alias(source)
        written = self.writing([target])

        def work() -> None:
            to.copy_(from_)
            written()

        host = tuple(one for one in (target, source) if not self.is_on_device(one))
        entry = self.launch(label, work, host_memory=host)
        if blocks:
            self.await_entry(entry)
        return target

    def _execute_now(self, call: Call, label: str) -> Any:
        """Execute a call after everything on the current stream, while the thread waits."""
        args, kwargs = self._arguments_of(call)
        found: list[Any] = []
        written = self.writing(call.writes)

        def work() -> None:
            found.append(call.function(*args, **kwargs))
            written()

        self.await_entry(self.launch(label, work))
        if not found:
            raise RuntimeError(f"{label} has failed on the device")
        if call.writes:
            return _returned(call, [])
        return _replaced(found[0], Tensor, self._moved)

    def _moved(self, tensor: Tensor) -> Tensor:
        """Return a tensor on the device with the values of a tensor of the host."""
        with self._changed:
            made = self._allocate(_Result(tensor.dtype, tensor.size(), tensor.stride()))
        to, written = self.alias(made), self.writing([made])

        def work() -> None:
            to.copy_(tensor)
            written()

        self.launch(labelled("copy_"), work)
        return made

    def values(self, tensor: Tensor) -> Any:
        if not self.is_on_device(tensor):
            return tensor.tolist()
        self.check_thread()
        with self.internally():
            source, found = self.alias(tensor), []
            self.await_entry(self.launch(labelled("tolist"), lambda: found.append(source.tolist())))
        return found[0]


class LateNetwork(Network):
    """Process groups whose operations are entries in queues."""

    machine: LateMachine

    def fail(self) -> None:
        super().fail()
        self.machine.fail()

    def launch(
        self, stream: str, transfer: Transfer, inputs: Sequence[Tensor], outputs: Sequence[Tensor], label: str
    ) -> None:
        machine, rank = self.machine, self.machine.rank
        machine.check_thread()
        # The group's stream starts after the current one.
        after = (machine.launch("an event"),) if rank.has_device else ()
        aliases = [machine.alias(tensor) for tensor in inputs], [machine.alias(tensor) for tensor in outputs]
        transfer.parts[rank.number] = Part(*aliases, machine.writing(outputs))
        machine.launch(label, after=after, transfer=transfer, stream=stream)

    def finish(self, transfer: Transfer, rank: int, *, orders: bool) -> None:
        entry: Entry = transfer.launches[rank]
        if not orders:
            return
        if self.machine.rank.has_device:
            self.machine.order_stream(entry)
        else:
            self.machine.await_entry(entry)

    def is_done(self, transfer: Transfer, rank: int) -> bool:
        self.machine.advance()
        entry: Entry = transfer.launches[rank]
        return entry.is_done


def _described(queue: _Queue) -> str:
    """Return what heads a queue and what it waits for."""
    head = queue.entries[0]
    if head.pending:
        reason = "waits for " + ", ".join(f"{one.label} on {one.stream} ({one.queue.name})" for one in head.pending)
    elif head.transfer is not None and not head.transfer.is_launched:
        missing = sorted({*head.transfer.ranks} - head.transfer.launches.keys())
        reason = f"waits for ranks {missing}, which have not launched it"
    elif not head.can_run:
        late = [one for one in head.partners if not one.has_arrived]
        reason = "waits for other ranks, where it is " + ", ".join(
            f"no. {one.queue.entries.index(one) + 1} in {one.queue.name}" for one in late
        )
    else:
        reason = "can be executed"
    return f"{queue.name}: {head.label} on {head.stream} {reason}; {len(queue.entries) - 1} entries follow"


# Calls.


def _counts(call: Call) -> bool:
    """Return whether the operation counts the elements of an index of booleans, which makes the host wait."""
    return call.name in _INDEXED and any(one.dtype in (torch.bool, torch.uint8) for one in tensors_of(call.args[1]))


def _replaced(value: Any, kind: type, replace: Callable[[Any], Any]) -> Any:
    """Return an argument or a result with everything of a type in it replaced."""
    if isinstance(value, kind):
        return replace(value)
    if isinstance(value, list | tuple):
        return type(value)(_replaced(one, kind, replace) for one in value)
    return value


def _key(call: Call) -> Any:
    def of(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.dtype, value.size(), value.stride()
        return tuple(map(of, value)) if isinstance(value, list | tuple) else value

    return call.function, of(call.args), tuple((name, of(value)) for name, value in sorted(call.kwargs.items()))


def _tried(call: Call) -> Any:
    """Execute a call on zeros. Return the shapes of its results in the place of tensors; None: a view."""
    if (rows := call.kwargs.get("output_size")) is not None:  # `repeat_interleave`, whose sum of zeros would not fit
        return _Result(call.reads[0].dtype, torch.Size([rows]), (1,))
    stand_ins: list[Tensor] = []

    def stand_in(tensor: Tensor) -> Tensor:
        if tensor.numel():
            extent = 1 + sum((n - 1) * stride for n, stride in zip(tensor.size(), tensor.stride(), strict=True))
            stand_ins.append(torch.zeros(extent, dtype=tensor.dtype).as_strided(tensor.size(), tensor.stride()))
        else:
            stand_ins.append(torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype))
        return stand_ins[-1]

    args = _replaced(call.args, Tensor, stand_in)
    found = call.function(*args, **{name: _replaced(value, Tensor, stand_in) for name, value in call.kwargs.items()})
    addresses = {one.untyped_storage().data_ptr() for one in stand_ins} - {0}
    if any(one.untyped_storage().data_ptr() in addresses for one in tensors_of(found)):
        return None
    return _replaced(found, Tensor, lambda one: _Result(one.dtype, one.size(), one.stride()))


def _returned(call: Call, made: Any) -> Any:
    """Return a call's result: the arguments that it writes, or the tensors that it makes."""
    if not call.writes:
        return made
    returns = call.function._schema.returns
    return call.writes[0] if len(returns) == 1 else tuple(call.writes) if returns else None


def _bytes_of(result: _Result) -> int:
    if 0 in result.size:
        return 0
    extent = 1 + sum((n - 1) * stride for n, stride in zip(result.size, result.stride, strict=True))
    return extent * result.dtype.itemsize

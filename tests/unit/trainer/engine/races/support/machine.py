"""An emulated machine: ranks as threads of this process, each with a device whose streams are vector clocks.

The engine runs as it is, on the CPU. What it calls its device is memory of this process; each operation of torch is
done when it returns, and the detector learns which actor would execute it, and after what, on a device that works
asynchronously:

- An operation on memory of the device belongs to the current stream of the thread that launches it. It happens after
  all earlier operations of that stream, and after everything that the thread has done or waited for.
- An operation on memory of the host belongs to the thread.
- A copy between the two belongs to the stream; the thread waits for it unless it is `non_blocking` and the memory is
  pinned. Reading a value waits, too.
- An event has the clock of its stream. A stream or a thread that waits for it has counted what the event has.

With the device "cpu" there are no streams, as in the product: threads do everything, and only messages and collectives
are asynchronous.
"""

import itertools
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from pseudoreal_trainer.engine.ranks.streams import Stream, Streams
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.unit.trainer.engine.races.support.detector import Actor, Block, Clock, Detector, Operation, Place, Race, join
from tests.unit.trainer.engine.races.support.sites import Site, engine_frame, site_of

COMPUTE = "compute"
MAIN = "main"
"""Name of the thread that begins a rank; its current device is the rank's."""
CPU = torch.device("cpu")


class Rank:
    """One rank of the machine, with its streams."""

    def __init__(self, number: int, device: torch.device) -> None:
        self.number, self.device = number, device
        self.actors: dict[str, Actor] = {}

    @property
    def has_device(self) -> bool:
        return self.device.type != "cpu"

    def actor(self, name: str) -> Actor:
        """Return the rank's stream with this name."""
        return self.actors.setdefault(name, Actor(f"{name} of rank {self.number}"))


class _Thread(threading.local):
    """State of a thread of a rank."""

    rank: Rank | None = None
    """None: a thread that is not emulated."""
    actor: Actor
    stream = COMPUTE
    has_device = False
    """Whether the rank's device is the thread's current device."""
    places_on_device = False
    """Whether new tensors are created on the device, as an argument said."""
    is_internal = False
    """Whether the emulation itself calls torch."""

    def __init__(self) -> None:
        self.arrays: deque[tuple[int, Tensor]] = deque(maxlen=2)
        """Addresses of the newest arrays of NumPy, and the tensors whose memory they are."""


class EmulatedEvent:
    """Replacement for an event of a device."""

    def __init__(self, machine: "Machine", clock: Clock) -> None:
        self._machine, self._clock = machine, clock

    def synchronize(self) -> None:
        self._machine.check_thread()
        # Called by `synchronize` of streams.py, whose caller is the site.
        if not self._machine.passes_over(depth=2):
            self._machine.learn(self._clock)

    def order(self, actor: Actor) -> None:
        """Order the actor's later operations after the event."""
        join(actor.clock, self._clock)

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: "EmulatedEvent") -> float:
        return 0.0


class EmulatedStreams(Streams):
    """Streams of an emulated device."""

    def __init__(self, machine: "Machine", device: torch.device) -> None:
        super().__init__(CPU)
        self.device, self._machine = device, machine

    @property
    def are_real(self) -> bool:
        return True

    def enter_thread(self) -> None:
        self._machine.thread.has_device = True

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        thread = self._machine.thread
        before, thread.stream = thread.stream, stream.value
        try:
            yield
        finally:
            thread.stream = before

    def record_event(self) -> Any:
        with self._machine.detector.lock:
            clock = dict(self._machine.stream.clock)
            join(clock, self._machine.thread.actor.clock)
            return EmulatedEvent(self._machine, clock)

    def record_timed_event(self) -> Any:
        return self.record_event()

    def wait_event(self, event: Any) -> None:
        if event is not None and not self._machine.passes_over(depth=1):
            with self._machine.detector.lock:
                event.order(self._machine.stream)


@dataclass
class Machine:
    """Threads, streams and memory of all ranks of one run."""

    device: str = "cuda"
    """Type of the emulated device; cpu: none."""
    removed: Site | None = None
    """Wait of the engine that orders nothing in this run."""
    detector: Detector = field(default_factory=Detector)
    reached: set[Site] = field(default_factory=set)
    """Waits that this run has executed."""
    _numbers: Any = field(default_factory=itertools.count)
    _blocks: dict[int, tuple[Block, Any]] = field(default_factory=dict)
    """Address of a tensor's memory -> its block, and a reference that ends the entry with the memory."""
    _pinned: list[range] = field(default_factory=list)
    """Addresses that are pinned."""

    def __post_init__(self) -> None:
        self.thread = _Thread()

    # Threads and streams.

    def new_rank(self, number: int) -> Rank:
        return Rank(number, torch.device(self.device, number) if self.device != "cpu" else CPU)

    @contextmanager
    def entered(self, rank: Rank, name: str, clock: Clock) -> Iterator[None]:
        """Make this thread a thread of the rank. `clock`: of the thread that started it."""
        self.thread.rank = rank
        self.thread.actor = Actor(f"thread {name} {next(self._numbers)} of rank {rank.number}", dict(clock))
        self.thread.has_device = name == MAIN
        with _Placement(self), _Recorder(self):
            yield
        self.thread.rank = None

    @property
    def is_entered(self) -> bool:
        return self.thread.rank is not None

    @property
    def rank(self) -> Rank:
        assert self.thread.rank is not None, "this is a thread of a rank"
        return self.thread.rank

    @property
    def stream(self) -> Actor:
        """Current stream of this thread."""
        return self.rank.actor(self.thread.stream)

    @property
    def waiting_actor(self) -> Actor:
        """Actor that waits for a collective: the current stream, or the thread itself without a device."""
        return self.stream if self.rank.has_device else self.thread.actor

    def streams(self, device: torch.device) -> Streams:
        return EmulatedStreams(self, device)

    def check_thread(self) -> None:
        """Report a thread that uses the device before it has made the rank's device its own: torch would make a context
        on the machine's first device, which takes memory there."""
        if self.rank.has_device and not self.thread.has_device:
            self.misuse(f"a thread uses the device before `enter_thread`, in {labelled('a call')}")

    def learn(self, clock: Clock) -> None:
        """Order this thread's later operations after those that the clock has counted."""
        with self.detector.lock:  # other threads read this thread's clock
            join(self.thread.actor.clock, clock)

    def synchronize_device(self) -> None:
        """Make this thread wait for all streams of its device."""
        with self.detector.lock:
            for actor in self.rank.actors.values():
                self.learn(actor.clock)

    def passes_over(self, depth: int) -> bool:
        """Return whether the wait that called, `depth` frames above the caller, is removed in this run."""
        frame = engine_frame()
        for _ in range(depth - 1):
            assert frame is not None, "a primitive of streams.py has a caller in the engine"
            frame = frame.f_back
        site = None if frame is None else site_of(frame)
        if site is not None:
            self.reached.add(site)
        return site is not None and site == self.removed

    # Memory.

    def block(self, tensor: Tensor) -> Block | None:
        """Return the block of a tensor's memory; None for a tensor without memory."""
        storage = tensor.untyped_storage()
        address, size = storage.data_ptr(), storage.nbytes()
        if size == 0 or address == 0:  # no elements, or torch's meta device
            return None
        with self.detector.lock:
            if address not in self._blocks:
                place: Place = "pinned" if any(address in pinned for pinned in self._pinned) else "pageable"
                self._keep(tensor, self.detector.allocate(place, size))
            return self._blocks[address][0]

    def is_on_device(self, tensor: Tensor) -> bool:
        block = self.block(tensor)
        return block is not None and block.place == "device"

    def place_on_device(self, tensor: Tensor) -> Block | None:
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
        self._pinned.append(range(address, address + size))
        with self.detector.lock:
            if address in self._blocks:
                self._blocks[address][0].place = "pinned"

    def unpin(self, address: int) -> None:
        """Unpin memory: the system may give it to others afterwards."""
        self._pinned = [pinned for pinned in self._pinned if pinned.start != address]
        with self.detector.lock:
            block, _ = self._blocks[address]
            self._access(block, (0, block.size), self.begin_on_host(), "the memory's release", is_write=True)

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
                self._access(block, _span(tensor), operation, label, is_write=is_write)

    def access_on_host(self, tensor: Tensor, label: str, *, is_write: bool) -> None:
        """Record an access by code that is not torch's, such as a read of a file into the tensor's memory."""
        if self.is_on_device(tensor):
            self.misuse(f"the host accesses memory of the device in {labelled(label)}")
        self.access(tensor, self.begin_on_host(), labelled(label), is_write=is_write)

    def tensor_of(self, array: Any) -> Tensor:
        """Return the tensor of which this thread made the array."""
        return next(tensor for address, tensor in self.thread.arrays if address == array.ctypes.data)

    def misuse(self, sentence: str) -> None:
        self.detector.report(Race("misuse", "", sentence))

    def _access(self, block: Block, span: tuple[int, int], operation: Operation, label: str, *, is_write: bool) -> None:
        with self.detector.lock:
            self.detector.access(block, span, operation, label, is_write=is_write)

    @contextmanager
    def internally(self) -> Iterator[None]:
        """Call torch in the context without recording it."""
        before, self.thread.is_internal = self.thread.is_internal, True
        try:
            yield
        finally:
            self.thread.is_internal = before

    @contextmanager
    def placing(self) -> Iterator[None]:
        """Create tensors on the device in the context."""
        before, self.thread.places_on_device = self.thread.places_on_device, True
        try:
            yield
        finally:
            self.thread.places_on_device = before


def labelled(name: str) -> str:
    """Return an operation's name with the line of the engine that called it."""
    frame = engine_frame()
    if frame is None:
        return name
    return _label(name, frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


@cache
def _label(name: str, path: str, line: int, function: str) -> str:
    return f"{name} ({path.rsplit('/', 1)[-1]}:{line} {function})"


def _span(tensor: Tensor) -> tuple[int, int]:
    """Return the first byte of a tensor in its memory, and the byte after its last one."""
    first = int(tensor.storage_offset())
    last = first + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return first * tensor.itemsize, (last + 1) * tensor.itemsize


# What the engine's Python code sees of its device.

_DEVICE_OF, _IS_CUDA = torch.Tensor.device.__get__, torch.Tensor.is_cuda.__get__  # type: ignore[attr-defined]


class _Placement(TorchFunctionMode):
    """Lets tensors say that they are on the emulated device, and creates them there."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self._machine = machine

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, machine = kwargs or {}, self._machine
        if machine.thread.is_internal:
            return func(*args, **kwargs)
        if func == _DEVICE_OF:
            return machine.rank.device if machine.is_on_device(args[0]) else CPU
        if func == _IS_CUDA:
            return machine.is_on_device(args[0])
        if func == torch.Tensor.to:
            return self._to(*args, **kwargs)
        if func == torch.Tensor.cpu:
            return self._to(args[0], CPU)
        if func == torch.Tensor.tolist:
            return self._values(args[0])
        if func == torch.Tensor.numpy:
            if machine.is_on_device(args[0]):
                machine.misuse(f"the host takes memory of the device in {labelled('numpy')}")
            array = func(*args, **kwargs)
            machine.thread.arrays.append((array.ctypes.data, args[0]))
            return array
        if self._is_emulated(device := kwargs.get("device")):
            return self._create(func, args, kwargs)
        if not any(machine.is_on_device(one) for one in _tensors(args)):
            return func(*args, **kwargs)
        if device is not None:
            raise NotImplementedError(f"{func} from a tensor of the device with {device=}")
        with machine.placing():  # what the function makes without an input, for instance a mask
            return func(*args, **kwargs)

    def _is_emulated(self, device: Any) -> bool:
        return device is not None and torch.device(device).type == self._machine.rank.device.type != "cpu"

    def _create(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is torch.tensor:
            return self._to(func(*args, **kwargs | {"device": CPU}), kwargs["device"])
        with self._machine.placing():
            return func(*args, **kwargs | {"device": CPU})

    def _to(self, tensor: Tensor, *args: Any, non_blocking: bool = False, **kwargs: Any) -> Tensor:
        device = kwargs.pop("device", None)
        others = [one for one in args if not isinstance(one, torch.device | str)]
        for one in args:
            device = torch.device(one) if isinstance(one, torch.device | str) else device
        if device is None or self._is_emulated(device) == self._machine.is_on_device(tensor):
            return tensor.to(*others, **kwargs)
        dtype = next((one for one in others if isinstance(one, torch.dtype)), kwargs.get("dtype", tensor.dtype))
        if self._is_emulated(device):
            with self._machine.placing():
                moved = torch.empty(tensor.shape, dtype=dtype)
        else:
            moved = torch.empty(tensor.shape, dtype=dtype)
        return moved.copy_(tensor, non_blocking=non_blocking)

    def _values(self, tensor: Tensor) -> Any:
        """Return the values of a tensor as Python's numbers."""
        machine = self._machine
        if machine.is_on_device(tensor):
            operation = machine.begin_on_stream()
            machine.access(tensor, operation, labelled("tolist"), is_write=False)
            machine.learn(operation.clock)
        else:
            machine.access_on_host(tensor, "tolist", is_write=False)
        return tensor.tolist()


# Operations of torch.

_UNWRITTEN = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
"""Operations whose result nobody writes."""
_READS_VALUES = {"_local_scalar_dense", "equal", "nonzero", "masked_select"}
"""Operations after which the host knows values of the device."""
_COPIES = {"copy_", "_to_copy"}
_TAKES_HOST_INDICES = {"index", "index_put_", "_index_put_impl_"}


class _Recording:
    """Records the accesses of torch's operations in one thread."""

    _machine: Machine

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not self._machine.thread.is_internal:
            with self._machine.internally():
                self._record(func, args, kwargs, result)
        return result

    def _record(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        machine, name = self._machine, func._schema.name.split("::")[-1]
        reads, writes = _arguments(func, args, kwargs)
        inputs = [*reads, *writes]
        known = {_address(tensor) for tensor in inputs}
        made = [tensor for tensor in _tensors(result) if _address(tensor) not in known and _address(tensor)]
        if not writes and not made and name not in _READS_VALUES:
            return  # a view
        with machine.detector.lock:
            on_device = [tensor for tensor in inputs if machine.is_on_device(tensor)]
            is_kernel = bool(on_device) or (machine.thread.places_on_device and not inputs)
            label = labelled(name)
            if is_kernel and name not in _COPIES:
                reads = self._without_host_values(name, reads, label)
            operation = machine.begin_on_stream() if is_kernel else machine.begin_on_host()
            for tensor in reads:
                machine.access(tensor, operation, label, is_write=False)
            for tensor in writes:
                machine.access(tensor, operation, label, is_write=True)
            for tensor in made:
                block = machine.place_on_device(tensor) if is_kernel else machine._place_on_host(tensor)
                if block is not None and name not in _UNWRITTEN:
                    machine.access(tensor, operation, label, is_write=True)
            if is_kernel and self._waits(name, args, kwargs, [*inputs, *made]):
                machine.learn(operation.clock)

    def _without_host_values(self, name: str, reads: Sequence[Tensor], label: str) -> list[Tensor]:
        """Return the inputs on the device. Values of the host are read at once, by the thread."""
        machine, left = self._machine, []
        for tensor in reads:
            if machine.is_on_device(tensor) or tensor.numel() == 0:
                left.append(tensor)
                continue
            if tensor.dim() > 0 and name not in _TAKES_HOST_INDICES:
                machine.misuse(f"a tensor of the host among those of the device in {label}")
            machine.access(tensor, machine.begin_on_host(), label, is_write=False)
        return left

    def _waits(self, name: str, args: Any, kwargs: Any, tensors: Sequence[Tensor]) -> bool:
        """Return whether the thread waits for the operation."""
        if name in _READS_VALUES:
            return True
        hosts = [block for tensor in tensors if (block := self._machine.block(tensor)) and block.place != "device"]
        if name not in _COPIES or not hosts:
            return False
        is_asynchronous = kwargs.get("non_blocking", args[2] if name == "copy_" and len(args) > 2 else False)
        return not is_asynchronous or any(block.place == "pageable" for block in hosts)


class _Recorder(_Recording, TorchDispatchMode):
    # `__torch_dispatch__` is inherited: torch would wrap one that is defined here, and the wrapper imports torch's
    # compiler, which takes seconds.

    def __init__(self, machine: Machine) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._machine = machine


def _arguments(func: Any, args: Any, kwargs: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Return the tensors that an operation reads, and those that it writes."""
    reads: list[Tensor] = []
    writes: list[Tensor] = []
    for index, argument in enumerate(func._schema.arguments):
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        # Fused AdamW may scale gradients in place; without a scaler it only reads them.
        is_gradient = argument.name == "grads" and "_fused_adamw_" in func._schema.name
        is_written = argument.alias_info is not None and argument.alias_info.is_write and not is_gradient
        (writes if is_written else reads).extend(_tensors(value))
    return reads, writes


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()

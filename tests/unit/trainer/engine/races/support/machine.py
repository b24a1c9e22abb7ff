"""An emulated machine: ranks as threads of this process, each with a device, without the device's work.

The engine runs as it is, on the CPU. What it calls its device is memory of this process. This file has the threads, the
current stream of each, and what the engine's Python code sees of a tensor's device. When an operation of torch is
executed is decided by one of two machines: `recording.py` executes it at once, and records what would order it on a
device that works asynchronously; `late.py` queues it, and executes it later.

Both agree on which operations belong to a device:

- An operation on memory of the device belongs to the current stream of the thread that launches it.
- An operation on memory of the host belongs to the thread.
- A copy between the two belongs to the stream; the thread waits for it unless it is `non_blocking` and the memory is
  pinned. Reading a value waits, too.

With the device "cpu" there are no streams, as in the product: threads do everything, and only messages and collectives
are asynchronous.
"""

import itertools
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

import torch
from pseudoreal_trainer.engine.ranks.streams import Stream, Streams
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.unit.trainer.engine.races.support.detector import Actor, Clock, Detector, Place, Race, join
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
        return self._machine.record_event()

    def record_timed_event(self) -> Any:
        return self.record_event()

    def wait_event(self, event: Any) -> None:
        if event is not None and not self._machine.passes_over(depth=1):
            event.order_stream()


class EmulatedEvent(ABC):
    """Replacement for an event of a device."""

    def __init__(self, machine: "Machine") -> None:
        self._machine = machine

    def synchronize(self) -> None:
        self._machine.check_thread()
        # Called by `synchronize` of streams.py, whose caller is the site.
        if not self._machine.passes_over(depth=2):
            self.wait()

    @abstractmethod
    def wait(self) -> None:
        """Make this thread wait for the event."""

    @abstractmethod
    def order_stream(self) -> None:
        """Make the current stream of this thread wait for the event."""

    @abstractmethod
    def query(self) -> bool: ...

    def elapsed_time(self, _: "EmulatedEvent") -> float:
        return 0.0


@dataclass
class Machine(ABC):
    """Threads and streams of all ranks of one run."""

    device: str = "cuda"
    """Type of the emulated device; cpu: none."""
    removed: Site | None = None
    """Wait of the engine that orders nothing in this run."""
    detector: Detector = field(default_factory=Detector)
    reached: set[Site] = field(default_factory=set)
    """Waits that this run has executed."""
    _numbers: Any = field(default_factory=itertools.count)
    pinned: list[range] = field(default_factory=list)
    """Addresses that are pinned."""

    def __post_init__(self) -> None:
        self.thread = _Thread()

    @abstractmethod
    def perform(self, call: "Call") -> Any:
        """Execute a call of torch, or queue it. Return its result."""

    @abstractmethod
    def values(self, tensor: Tensor) -> Any:
        """Return the values of a tensor as Python's numbers."""

    def access_on_host(self, tensor: Tensor, label: str, *, is_write: bool) -> None:  # noqa: ARG002
        """Record an access by code that is not torch's, such as a read of a file into the tensor's memory."""
        if self.is_on_device(tensor):
            self.misuse(f"the host accesses memory of the device in {labelled(label)}")

    @abstractmethod
    def record_event(self) -> EmulatedEvent:
        """Return an event after everything launched so far on the current stream."""

    @abstractmethod
    def synchronize_device(self) -> None:
        """Make this thread wait for all streams of its device."""

    @abstractmethod
    def place_of(self, tensor: Tensor) -> Place | None:
        """Return where a tensor's memory is; None for a tensor without memory."""

    @abstractmethod
    def pin(self, address: int, size: int) -> None: ...

    @abstractmethod
    def unpin(self, address: int) -> None:
        """Unpin memory: the system may give it to others afterwards."""

    # Threads and streams.

    def new_rank(self, number: int) -> Rank:
        return Rank(number, torch.device(self.device, number) if self.device != "cpu" else CPU)

    @contextmanager
    def entered(self, rank: Rank, name: str, clock: Clock) -> Iterator[None]:
        """Make this thread a thread of the rank. `clock`: of the thread that started it."""
        self.thread.rank = rank
        self.thread.actor = Actor(f"thread {name} {next(self._numbers)} of rank {rank.number}", dict(clock))
        self.thread.has_device = name == MAIN
        with _Placement(self), _Dispatch(self):
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

    # Operations.

    def is_on_device(self, tensor: Tensor) -> bool:
        return self.place_of(tensor) == "device"

    def tensor_of(self, array: Any) -> Tensor:
        """Return the tensor of which this thread made the array."""
        return next(tensor for address, tensor in self.thread.arrays if address == array.ctypes.data)

    def misuse(self, sentence: str) -> None:
        self.detector.report(Race("misuse", "", sentence))

    @contextmanager
    def internally(self) -> Iterator[None]:
        """Call torch in the context for the emulation itself."""
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
            return machine.values(args[0])
        if func == torch.Tensor.numpy:
            if machine.is_on_device(args[0]):
                machine.misuse(f"the host takes memory of the device in {labelled('numpy')}")
            array = func(*args, **kwargs)
            machine.thread.arrays.append((array.ctypes.data, args[0]))
            return array
        if self._is_emulated(device := kwargs.get("device")):
            return self._create(func, args, kwargs)
        if not any(machine.is_on_device(one) for one in tensors_of(args)):
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


# Operations of torch.

UNWRITTEN = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
"""Operations whose result nobody writes."""
READS_VALUES = {"_local_scalar_dense", "equal", "nonzero", "masked_select"}
"""Operations after which the host knows values of the device."""
COPIES = {"copy_", "_to_copy"}
TAKES_HOST_INDICES = {"index", "index_put_", "_index_put_impl_"}


@dataclass(frozen=True)
class Call:
    """A call of an operation of torch."""

    function: Any
    args: Any
    kwargs: Any

    @property
    def name(self) -> str:
        return str(self.function._schema.name.split("::")[-1])

    def execute(self) -> Any:
        return self.function(*self.args, **self.kwargs)

    @cached_property
    def reads(self) -> list[Tensor]:
        return [tensor for tensor, is_written in self._tensors if not is_written]

    @cached_property
    def writes(self) -> list[Tensor]:
        return [tensor for tensor, is_written in self._tensors if is_written]

    @property
    def inputs(self) -> list[Tensor]:
        return [*self.reads, *self.writes]

    @cached_property
    def _tensors(self) -> list[tuple[Tensor, bool]]:
        """Tensors among the arguments, and whether the operation writes each."""
        found: list[tuple[Tensor, bool]] = []
        for index, argument in enumerate(self.function._schema.arguments):
            value = self.args[index] if index < len(self.args) else self.kwargs.get(argument.name)
            # Fused AdamW may scale gradients in place; without a scaler it only reads them.
            is_gradient = argument.name == "grads" and "_fused_adamw_" in self.function._schema.name
            is_written = argument.alias_info is not None and argument.alias_info.is_write and not is_gradient
            found.extend((tensor, is_written) for tensor in tensors_of(value))
        return found

    def is_kernel(self, machine: Machine) -> bool:
        """Return whether the operation belongs to a stream of the device."""
        return any(machine.is_on_device(tensor) for tensor in self.inputs) or (
            machine.thread.places_on_device and not self.inputs
        )

    def host_values(self, machine: Machine, label: str) -> list[Tensor]:
        """Return the inputs of a kernel whose values the thread reads at its launch. Only numbers and indices may come
        from the host."""
        found = [one for one in self.reads if one.numel() and not machine.is_on_device(one)]
        if any(one.dim() > 0 for one in found) and self.name not in TAKES_HOST_INDICES:
            machine.misuse(f"a tensor of the host among those of the device in {label}")
        return found

    def blocks(self, machine: Machine) -> bool:
        """Return whether the thread waits for a kernel."""
        if self.name in READS_VALUES:
            return True
        places = {machine.place_of(tensor) for tensor in self.inputs} & {"pinned", "pageable"}
        if self.name not in COPIES or not places:
            return False
        third = self.args[2] if self.name == "copy_" and len(self.args) > 2 else False
        return not self.kwargs.get("non_blocking", third) or "pageable" in places


class _Dispatching:
    _machine: Machine

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call = Call(func, args, kwargs or {})
        return call.execute() if self._machine.thread.is_internal else self._machine.perform(call)


class _Dispatch(_Dispatching, TorchDispatchMode):
    """Passes each operation of torch in one thread to the machine."""

    # `__torch_dispatch__` is inherited: torch would wrap one that is defined here, and the wrapper imports torch's
    # compiler, which takes seconds.

    def __init__(self, machine: Machine) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._machine = machine


def tensors_of(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in an argument or a result."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from tensors_of(one)

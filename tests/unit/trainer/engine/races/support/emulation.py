"""Puts a machine in the place of devices, networks and threads, while the engine runs on it."""

import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from pseudoreal_trainer.engine import engine
from pseudoreal_trainer.engine.state.direct_file import DirectFile
from pseudoreal_trainer.engine.state.disk import Staging
from pseudoreal_trainer.engine.state.pinned import BounceBuffers
from pseudoreal_trainer.engine.state.snapshot import Ring
from pseudoreal_trainer.engine.state.store import GradientBuffer
from torch import Tensor

from tests.unit.trainer.engine.races.support.detector import Clock, join
from tests.unit.trainer.engine.races.support.machine import MAIN, Machine
from tests.unit.trainer.engine.races.support.network import Network


@dataclass
class Emulation:
    """A machine with a network, in place of torch's devices and process groups."""

    machine: Machine
    network: Network
    _failures: list[BaseException] = field(default_factory=list)
    _buffers: dict[int, Clock] = field(default_factory=dict)
    """Address of a buffer that threads hand over -> clock of its last owner."""

    def run(self, work: Callable[[int], None], world: int) -> None:
        """Call `work(rank)` in a thread per rank. Raises the first failure of a rank."""
        with ExitStack() as stack:
            for replacement in self._replacements():
                stack.enter_context(replacement)
            threads = [
                threading.Thread(target=self._run_rank, args=(work, number), name=MAIN) for number in range(world)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        self.network.is_over = True
        if self._failures:
            raise self._failures[0]

    def _run_rank(self, work: Callable[[int], None], number: int) -> None:
        try:
            with self.machine.entered(self.machine.new_rank(number), MAIN, {}):
                work(number)
        except BaseException as error:
            self._failures.append(error)
            self.network.fail()

    def _replacements(self) -> Iterator[Any]:
        yield from self._of_threads()
        yield from self._of_memory()
        for name in (
            *("all_reduce", "reduce_scatter_tensor", "all_gather_into_tensor", "all_to_all_single"),
            *("isend", "irecv", "recv", "new_group", "split_group", "destroy_process_group"),
        ):
            yield patch.object(dist, name, getattr(self.network, name))
        if self.machine.device != "cpu":
            yield from self._of_device()

    # Order between threads: what one hands to another, the other has after it.

    def _of_threads(self) -> Iterator[Any]:
        machine = self.machine
        start, run, wait = threading.Thread.start, threading.Thread.run, threading.Thread.join

        def start_with_clock(thread: Any) -> None:
            if machine.is_entered:
                thread.emulated = machine.rank, dict(machine.thread.actor.clock)
            start(thread)

        def run_on_machine(thread: Any) -> None:
            if not hasattr(thread, "emulated"):
                run(thread)
                return
            rank, clock = thread.emulated
            with machine.entered(rank, thread.name, clock):
                run(thread)
                thread.emulated = rank, machine.thread.actor.clock

        def join_with_clock(thread: Any, timeout: float | None = None) -> None:
            wait(thread, timeout)
            if machine.is_entered and hasattr(thread, "emulated") and not thread.is_alive():
                machine.learn(thread.emulated[1])

        yield patch.object(threading.Thread, "start", start_with_clock)
        yield patch.object(threading.Thread, "run", run_on_machine)
        yield patch.object(threading.Thread, "join", join_with_clock)
        yield patch.object(queue, "SimpleQueue", lambda: _Queue(machine))
        for name in ("set_result", "set_exception"):
            yield patch.object(Future, name, self._gives(getattr(Future, name), _itself))
        for name in ("result", "exception", "done"):
            yield patch.object(Future, name, self._takes(getattr(Future, name), _itself))
        # Buffers that pass from thread to thread without a future: a clock per buffer.
        for kind in (Staging, BounceBuffers):
            yield patch.object(kind, "give_back", self._gives(kind.give_back, _argument))
            yield patch.object(kind, "take", self._takes(kind.take, _result))
        yield patch.object(GradientBuffer, "give_back", self._gives(GradientBuffer.give_back, _argument))
        yield patch.object(GradientBuffer, "take", self._takes(GradientBuffer.take, _value_of_future))
        yield patch.object(Ring, "give_back", self._gives(Ring.give_back, _itself))
        yield patch.object(Ring, "take", self._takes(Ring.take, _itself))

    def _gives(self, function: Callable[..., Any], what: "_What") -> Callable[..., Any]:
        """Return the function, after which what it gives has the clock of the thread."""

        def give(owner: Any, *arguments: Any) -> Any:
            if self.machine.is_entered and (given := what(owner, arguments, None)) is not None:
                with self.machine.detector.lock:
                    join(self._clock_of(given), self.machine.thread.actor.clock)
            return function(owner, *arguments)

        return give

    def _takes(self, function: Callable[..., Any], what: "_What") -> Callable[..., Any]:
        """Return the function, after which the thread is ordered after whoever gave what it takes."""

        def take(owner: Any, *arguments: Any, **named: Any) -> Any:
            result = function(owner, *arguments, **named)
            if self.machine.is_entered and (taken := what(owner, arguments, result)) is not None:
                self.machine.learn(self._clock_of(taken))
            return result

        return take

    def _clock_of(self, what: Any) -> Clock:
        """Return the clock of an object, or of the buffer at an address."""
        if isinstance(what, int):
            return self._buffers.setdefault(what, {})
        clock: Clock = vars(what).setdefault("emulated_clock", {})
        return clock

    # Memory that threads use without torch.

    def _of_memory(self) -> Iterator[Any]:
        machine, copyto = self.machine, np.copyto
        read, write = DirectFile.read, DirectFile.write

        def copy(target: Any, source: Any, *arguments: Any, **named: Any) -> None:
            if machine.is_entered:
                machine.access_on_host(machine.tensor_of(source), "copyto", is_write=False)
                machine.access_on_host(machine.tensor_of(target), "copyto", is_write=True)
            copyto(target, source, *arguments, **named)

        def read_file(file: Any, pieces: Any) -> None:
            read(file, pieces)
            for _, memory in pieces if machine.is_entered else ():
                machine.access_on_host(memory, "the disk's read", is_write=True)

        def write_file(file: Any, pieces: Any) -> None:
            for _, memory in pieces if machine.is_entered else ():
                machine.access_on_host(memory, "the disk's write", is_write=False)
            write(file, pieces)

        yield patch.object(np, "copyto", copy)
        yield patch.object(DirectFile, "read", read_file)
        yield patch.object(DirectFile, "write", write_file)

    # Calls of an accelerator besides streams.

    def _of_device(self) -> Iterator[Any]:
        machine = self.machine

        def register(address: int, size: int, _: int) -> int:
            machine.pin(address, size)
            return 0

        def synchronize(*_: Any) -> None:
            if not machine.passes_over(depth=1):
                machine.synchronize_device()

        runtime = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=machine.unpin)
        yield patch.object(engine, "Streams", machine.streams)
        yield patch.object(torch.cuda, "cudart", lambda: runtime)
        yield patch.object(torch.cuda, "device", lambda _: nullcontext())
        yield patch.object(torch.accelerator, "device_index", lambda _: nullcontext())
        for module in (torch.cuda, torch.accelerator):
            yield patch.object(module, "synchronize", synchronize)
        yield patch.object(torch.cuda, "get_device_capability", lambda *_: (9, 0))


_What = Callable[[Any, Any, Any], Any]
"""Returns what is handed over, from a method's object, its arguments and its result."""


def _itself(owner: Any, _: Any, __: Any) -> Any:
    return owner


def _argument(_: Any, arguments: Any, __: Any) -> Any:
    buffer: Tensor = arguments[0]
    return buffer.data_ptr()


def _result(_: Any, __: Any, result: Any) -> Any:
    return result.data_ptr()


def _value_of_future(_: Any, __: Any, future: Any) -> Any:
    # A future that waits for a buffer gets the clock of the thread that gives the buffer back.
    return future.result().data_ptr() if future.done() else None


class _Queue:
    """Replacement for queue.SimpleQueue: who takes an item is ordered after who put it in."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._queue: Any = _SimpleQueue()

    def put(self, item: Any) -> None:
        clock: Clock = dict(self._machine.thread.actor.clock) if self._machine.is_entered else {}
        self._queue.put((item, clock))

    def get(self, *arguments: Any, **named: Any) -> Any:
        item, clock = self._queue.get(*arguments, **named)
        if self._machine.is_entered:
            self._machine.learn(clock)
        return item

    def get_nowait(self) -> Any:
        return self.get(block=False)

    def empty(self) -> bool:
        return bool(self._queue.empty())

    def qsize(self) -> int:
        return int(self._queue.qsize())


_SimpleQueue = queue.SimpleQueue

"""Activation offload: keeps inputs of positions on the host between forward and backward pass, if the phase enables
it."""

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from pseudoreal_trainer.engine.ranks.streams import Event, Stream, Streams, synchronize
from pseudoreal_trainer.engine.ranks.trace import Trace
from pseudoreal_trainer.engine.state.pinned import Allocator, Block
from pseudoreal_trainer.plan.memory.activations import PENDING_OFFLOADS
from pseudoreal_trainer.plan.records import Stash, Unstash

Key = tuple[int, int]
"""Position and micro-batch."""


@dataclass(frozen=True)
class _Moving:
    """A copy of an input to or from the host, in flight."""

    tensor: Tensor
    """Input of a position, [B, T, H], on the device."""
    done: Event


@dataclass(frozen=True)
class _Stashed:
    """An input in a host buffer, or on its way there."""

    shape: torch.Size
    buffer: Tensor
    done: Event
    """Event after which the buffer holds the input."""


class ActivationOffload:
    """Copies inputs of positions to the host and back. Main thread only."""

    def __init__(self, streams: Streams, trace: Trace, memory: Allocator, device: torch.device) -> None:
        """`memory`: allocator of host memory for copies to and from the device."""
        self._streams, self._trace, self._memory, self._device = streams, trace, memory, device
        self._block = Block(0, memory)
        self._free: list[tuple[Tensor, Event]] = []
        """Free host buffers, [numel] each, with the event recorded after the last read of the buffer's previous
        input."""
        self._prepared = (0, 0, torch.float32)
        self._leaving: deque[_Moving] = deque()
        self._on_host: dict[Key, _Stashed] = {}
        self._reloading: dict[Key, _Moving] = {}

    def prepare(self, count: int, numel: int, dtype: torch.dtype) -> None:
        """Allocate buffers for `count` inputs of at most `numel` elements each, unless they exist.

        Call this before the first pass of a run. Pinning memory waits for all kernels of the device, and a kernel may
        wait for a message that depends on this rank's later calls.
        """
        if self._prepared != (count, numel, dtype):
            self.close()
            self._prepared, self._block = (count, numel, dtype), Block(count * numel * dtype.itemsize, self._memory)
            self._free = [(buffer, None) for buffer in self._block.memory.view(dtype).view(count, numel)]

    def stash(self, record: Stash, tensor: Tensor) -> None:
        """Start to copy an input, [B, T, H], to the host. Its device memory is freed once the copy is done."""
        computed = self._streams.record_event()
        # The buffer's previous input may still be on its way back to the device: wait for `read` before overwriting it.
        buffer, read = self._free.pop()
        with self._streams.on(Stream.COPY_OUT):
            self._streams.wait_event(computed)
            self._streams.wait_event(read)
            buffer[: tensor.numel()].view(tensor.shape).copy_(tensor, non_blocking=True)
            copied = self._streams.record_event()
        self._on_host[record.position, record.micro_batch] = _Stashed(tensor.shape, buffer, copied)
        self._keep_until_copied(_Moving(tensor, copied))
        self._trace.count_bytes("d2h", tensor.nbytes)

    def unstash(self, record: Unstash) -> None:
        """Start to copy an input back to the device."""
        stashed = self._on_host.pop((record.position, record.micro_batch))
        # Allocated on the compute stream, which will use the tensor. After `free`, no kernel reads the memory's
        # previous content.
        tensor = torch.empty(stashed.shape, dtype=stashed.buffer.dtype, device=self._device)
        free = self._streams.record_event()
        with self._streams.on(Stream.COPY_IN):
            self._streams.wait_event(free)
            self._streams.wait_event(stashed.done)
            tensor.copy_(stashed.buffer[: tensor.numel()].view(stashed.shape), non_blocking=True)
            copied = self._streams.record_event()
        self._reloading[record.position, record.micro_batch] = _Moving(tensor, copied)
        self._free.append((stashed.buffer, copied))
        self._trace.count_bytes("h2d", tensor.nbytes)

    def take_reloaded(self, key: Key) -> Tensor | None:
        """Return a reloaded input, [B, T, H]; None if the input was not reloaded. Passes launched after this call may
        read it."""
        if key not in self._reloading:
            return None
        returning = self._reloading.pop(key)
        self._streams.wait_event(returning.done)
        return returning.tensor

    def finish(self) -> None:
        """Wait until the last copies to the host are done."""
        while self._leaving:
            self._release_oldest()

    def close(self) -> None:
        """Free the buffers; no copy may use them any more."""
        self._block.close()

    def _keep_until_copied(self, moving: _Moving) -> None:
        """Keep a reference to the tensor until its copy to the host is done.

        The memory belongs to the compute stream, and the copy runs on another stream. If the allocator had to notice
        the end of the copy, a thread that launches all passes ahead of the GPU would hold all tensors, as if there were
        no offload.
        """
        self._leaving.append(moving)
        if len(self._leaving) > PENDING_OFFLOADS:
            self._release_oldest()

    def _release_oldest(self) -> None:
        # `moving` owns the tensor until it is copied; with `synchronize(popleft().done)`, nothing would own it.
        moving = self._leaving.popleft()
        synchronize(moving.done)

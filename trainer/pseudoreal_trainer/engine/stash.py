"""Inputs of positions that wait on the host for their backward pass, where the phase asks for that."""

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from pseudoreal_trainer.engine.ranks.lanes import Lane, Lanes, Mark, reach
from pseudoreal_trainer.engine.ranks.trace import Trace
from pseudoreal_trainer.engine.state.pinned import Allocator, Block
from pseudoreal_trainer.forecast.memory.activations import LEAVING
from pseudoreal_trainer.plan.records import Stash, Unstash

Key = tuple[int, int]
"""A position and a micro-batch."""


@dataclass(frozen=True)
class _Moving:
    tensor: Tensor
    """The input, [B, T, H], on the device."""
    done: Mark


@dataclass(frozen=True)
class _Stashed:
    shape: torch.Size
    buffer: Tensor
    done: Mark


class StashedInputs:
    """Inputs on the host, on their way there, and on their way back. Only the main thread calls this."""

    def __init__(self, lanes: Lanes, trace: Trace, memory: Allocator, device: torch.device) -> None:
        """`memory`: allocator of the host memory that crosses the bus."""
        self._lanes, self._trace, self._memory, self._device = lanes, trace, memory, device
        self._block = Block(0, memory)
        self._free: list[tuple[Tensor, Mark]] = []
        """Buffers, [numel] each, with the mark after which the input that was in it is no longer read."""
        self._made = (0, 0, torch.float32)
        self._leaving: deque[_Moving] = deque()
        self._on_host: dict[Key, _Stashed] = {}
        self._returning: dict[Key, _Moving] = {}

    def prepare(self, count: int, numel: int, dtype: torch.dtype) -> None:
        """Makes buffers for `count` inputs of at most `numel` elements each. To be called before the first pass of a
        run: pinning memory waits for all kernels of the device, and one of these may wait for a message that depends on
        what comes after."""
        if self._made != (count, numel, dtype):
            self.close()
            self._made, self._block = (count, numel, dtype), Block(count * numel * dtype.itemsize, self._memory)
            self._free = [(buffer, None) for buffer in self._block.memory.view(dtype).view(count, numel)]

    def stash(self, record: Stash, tensor: Tensor) -> None:
        """Starts to copy an input, [B, T, H], to the host; the device's memory of it is free once that is done."""
        computed = self._lanes.mark()
        buffer, read = self._free.pop()
        with self._lanes.on(Lane.COPY_OUT):
            self._lanes.follow(computed)
            self._lanes.follow(read)
            buffer[: tensor.numel()].view(tensor.shape).copy_(tensor, non_blocking=True)
            copied = self._lanes.mark()
        self._on_host[record.position, record.micro_batch] = _Stashed(tensor.shape, buffer, copied)
        self._leave(_Moving(tensor, copied))
        self._trace.move("d2h", tensor.nbytes)

    def unstash(self, record: Unstash) -> None:
        """Starts to copy an input back to the device."""
        stashed = self._on_host.pop((record.position, record.micro_batch))
        # Memory of the lane of compute, which uses it: what was in it before is read no more after this mark.
        tensor = torch.empty(stashed.shape, dtype=stashed.buffer.dtype, device=self._device)
        free = self._lanes.mark()
        with self._lanes.on(Lane.COPY_IN):
            self._lanes.follow(free)
            self._lanes.follow(stashed.done)
            tensor.copy_(stashed.buffer[: tensor.numel()].view(stashed.shape), non_blocking=True)
            copied = self._lanes.mark()
        self._returning[record.position, record.micro_batch] = _Moving(tensor, copied)
        self._free.append((stashed.buffer, copied))
        self._trace.move("h2d", tensor.nbytes)

    def returned(self, key: Key) -> Tensor | None:
        """An input that was brought back, [B, T, H], for passes that are called from now on; None: it was not."""
        if key not in self._returning:
            return None
        returning = self._returning.pop(key)
        self._lanes.follow(returning.done)
        return returning.tensor

    def finish(self) -> None:
        """Waits until the last copies to the host are made."""
        while self._leaving:
            self._release_oldest()

    def close(self) -> None:
        """Frees the buffers, which no copy uses any more."""
        self._block.close()

    def _leave(self, moving: _Moving) -> None:
        """Keeps the tensor until it is copied.

        The lane of compute, to which its memory belongs, knows nothing of the reader. If the allocator had to notice
        that the copy is made, a thread that calls all passes ahead of the GPU would hold all of the tensors, as if
        there were no stash.
        """
        self._leaving.append(moving)
        if len(self._leaving) > LEAVING:
            self._release_oldest()

    def _release_oldest(self) -> None:
        # The tensor has an owner until it is copied: with `popleft().done` as argument it would have none in `reach`.
        moving = self._leaving.popleft()
        reach(moving.done)

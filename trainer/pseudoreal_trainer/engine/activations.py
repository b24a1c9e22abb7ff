"""What the forward pass leaves for the backward pass: the inputs of positions, or whole graphs."""

from collections import deque
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pseudoreal_trainer.engine.ranks.lanes import Lane, Lanes, Mark, reach
from pseudoreal_trainer.engine.ranks.trace import Trace
from pseudoreal_trainer.engine.state.pinned import Allocator, Block
from pseudoreal_trainer.forecast.memory.activations import LEAVING
from pseudoreal_trainer.plan.steps import Stash, Unstash

Key = tuple[int, int]
"""A position and a micro-batch."""


@dataclass(frozen=True)
class Graph:
    """A block's pass with everything that its backward pass needs."""

    input: Tensor
    output: Tensor


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


class StashRoom:
    """Host buffers for the inputs of positions. They are made before the first step of a plan: pinning memory waits for
    all kernels of the device, and one of these may wait for a message that depends on what comes after."""

    def __init__(self, memory: Allocator) -> None:
        self._memory = memory
        self._block = Block(0, memory)
        self._free: list[tuple[Tensor, Mark]] = []
        self._made = (0, 0, torch.float32)

    def prepare(self, count: int, numel: int, dtype: torch.dtype) -> None:
        """Makes room for `count` tensors of at most `numel` elements each."""
        if self._made != (count, numel, dtype):
            self.close()
            self._made, self._block = (count, numel, dtype), Block(count * numel * dtype.itemsize, self._memory)
            self._free = [(buffer, None) for buffer in self._block.memory.view(dtype).view(count, numel)]

    def take(self) -> tuple[Tensor, Mark]:
        """A buffer, [numel], and the mark after which its last content is no longer read."""
        return self._free.pop()

    def give_back(self, buffer: Tensor, read: Mark) -> None:
        self._free.append((buffer, read))

    def close(self) -> None:
        """Frees the buffers, all of which must have been given back."""
        self._block.close()


@dataclass
class Activations:
    """Inputs and gradients of the positions of one rank, in one step."""

    lanes: Lanes
    trace: Trace
    room: StashRoom
    inputs: dict[Key, Tensor] = field(default_factory=dict)
    """Input of each position that is on the device, [B, T, H]."""
    gradients: dict[Key, Tensor] = field(default_factory=dict)
    """Gradient of the input of each position, [B, T, H]."""
    graphs: dict[Key, Graph] = field(default_factory=dict)
    _leaving: deque[_Moving] = field(default_factory=deque)
    _on_host: dict[Key, _Stashed] = field(default_factory=dict)
    _returning: dict[Key, _Moving] = field(default_factory=dict)

    def stash(self, step: Stash) -> None:
        key = (step.position, step.micro_batch)
        tensor, computed = self.inputs.pop(key), self.lanes.mark()
        buffer, read = self.room.take()
        with self.lanes.on(Lane.COPY_OUT):
            self.lanes.follow(computed)
            self.lanes.follow(read)
            buffer[: tensor.numel()].view(tensor.shape).copy_(tensor, non_blocking=True)
            copied = self.lanes.mark()
        self._on_host[key] = _Stashed(tensor.shape, buffer, copied)
        self._leave(_Moving(tensor, copied))
        self.trace.move("d2h", tensor.nbytes)

    def unstash(self, step: Unstash, device: torch.device) -> None:
        stashed = self._on_host.pop((step.position, step.micro_batch))
        # Memory of the lane of compute, which uses it: what was in it before is read no more after this mark.
        tensor = torch.empty(stashed.shape, dtype=stashed.buffer.dtype, device=device)
        free = self.lanes.mark()
        with self.lanes.on(Lane.COPY_IN):
            self.lanes.follow(free)
            self.lanes.follow(stashed.done)
            tensor.copy_(stashed.buffer[: tensor.numel()].view(stashed.shape), non_blocking=True)
            copied = self.lanes.mark()
        self._returning[step.position, step.micro_batch] = _Moving(tensor, copied)
        self.room.give_back(stashed.buffer, copied)
        self.trace.move("h2d", tensor.nbytes)

    def take_input(self, key: Key) -> Tensor:
        """The input of a position, [B, T, H], for the backward pass, which is the last to need it."""
        if key not in self._returning:
            return self.inputs.pop(key)
        returning = self._returning.pop(key)
        self.lanes.follow(returning.done)
        return returning.tensor

    def finish(self) -> None:
        """Waits until the last copies to the host are made."""
        while self._leaving:
            reach(self._leaving.popleft().done)

    def _leave(self, moving: _Moving) -> None:
        """Keeps the tensor until it is copied.

        The lane of compute, to which its memory belongs, knows nothing of the reader. If the allocator had to notice
        that the copy is made, a thread that calls all passes ahead of the GPU would hold all of the tensors, as if
        there were no stash.
        """
        self._leaving.append(moving)
        if len(self._leaving) > LEAVING:
            reach(self._leaving.popleft().done)

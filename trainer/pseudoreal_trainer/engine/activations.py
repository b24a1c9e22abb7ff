"""What the forward pass leaves for the backward pass: the inputs of positions, or whole graphs."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from pseudoreal_trainer.engine.lanes import Lane, Lanes, Mark
from pseudoreal_trainer.engine.trace import Trace
from pseudoreal_trainer.plan.steps import Stash, Unstash

Key = tuple[int, int]
"""Position, micro-batch."""


@dataclass(frozen=True)
class Graph:
    """A block's pass with everything that its backward pass needs."""

    input: Tensor
    output: Tensor


@dataclass(frozen=True)
class _Moving:
    tensor: Tensor
    done: Mark


@dataclass
class Activations:
    """Of one step on one rank."""

    lanes: Lanes
    trace: Trace
    inputs: dict[Key, Tensor] = field(default_factory=dict)
    """[B, T, H]"""
    gradients: dict[Key, Tensor] = field(default_factory=dict)
    """Of the input of a position, [B, T, H]."""
    graphs: dict[Key, Graph] = field(default_factory=dict)
    _on_host: dict[Key, _Moving] = field(default_factory=dict)
    _returning: dict[Key, _Moving] = field(default_factory=dict)

    def stash(self, step: Stash) -> None:
        key = (step.position, step.micro_batch)
        tensor, computed = self.inputs.pop(key), self.lanes.mark()
        with self.lanes.on(Lane.COPY_OUT):
            self.lanes.follow(computed)
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self.lanes.are_real)
            host.copy_(tensor, non_blocking=True)
            self._keep_for_present_lane(tensor)
            self._on_host[key] = _Moving(host, self.lanes.mark())
        self.trace.move("d2h", tensor.nbytes)

    def unstash(self, step: Unstash, device: torch.device) -> None:
        key = (step.position, step.micro_batch)
        stashed = self._on_host.pop(key)
        with self.lanes.on(Lane.COPY_IN):
            self.lanes.follow(stashed.done)
            tensor = torch.empty_like(stashed.tensor, device=device, pin_memory=False)
            tensor.copy_(stashed.tensor, non_blocking=True)
            self._returning[key] = _Moving(tensor, self.lanes.mark())
        self.trace.move("h2d", tensor.nbytes)

    def take_input(self, key: Key) -> Tensor:
        """For the backward pass, which is the last to need it."""
        if key not in self._returning:
            return self.inputs.pop(key)
        returning = self._returning.pop(key)
        self.lanes.follow(returning.done)
        self._keep_for_present_lane(returning.tensor)
        return returning.tensor

    def _keep_for_present_lane(self, tensor: Tensor) -> None:
        # The allocator gives memory back to the lane that asked for it, unless it knows who else reads it.
        if self.lanes.are_real:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))

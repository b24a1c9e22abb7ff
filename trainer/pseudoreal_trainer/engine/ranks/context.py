"""Gathers of keys and values over the context ranks.

The main thread calls them. On a GPU, autograd runs the backward pass of a gather in its own thread of the device, while
the main thread waits for the gradients: so one thread at a time uses the group.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from pseudoreal_trainer.engine.ranks.process_groups import ProcessGroups
from pseudoreal_trainer.engine.ranks.trace import Trace
from pseudoreal_trainer.model.context import ContextCut


class ContextGather:
    """Gathers parts of sequences over the ranks with the same sequences. All of these ranks call it in plan order."""

    def __init__(self, groups: ProcessGroups, trace: Trace) -> None:
        self._group, self._trace, self._heartbeat = groups.context, trace, groups.ranks.heartbeat
        self.rank = groups.context_rank

    def __call__(self, cut: ContextCut, part: Tensor) -> Tensor:
        """Return whole sequences, [B, T / C, ...] -> [B, T, ...]. The backward pass returns to each rank the gradient
        of its part, summed over the ranks."""
        out: Tensor = _Gather.apply(part, cut, self)
        return out

    def all_gather(self, part: Tensor) -> Tensor:
        """Return the parts of all ranks, [...] -> [C, ...]."""
        assert self._group is not None, "sequences are cut only over several ranks"
        part = part.contiguous()
        parts = part.new_empty(self._group.size(), *part.shape)
        with self._heartbeat.waiting("gathers keys and values"):
            dist.all_gather_into_tensor(parts.view(-1), part.view(-1), group=self._group)
        self._trace.count_bytes("context", parts.nbytes - part.nbytes)
        return parts

    def sum_of_own(self, parts: Tensor) -> Tensor:
        """Return this rank's part, summed over the ranks: [C, ...] -> [...].

        The sum is in at least float32, and in the order of the ranks, so it is rounded to bfloat16 only once, and has
        the same bits on every backend. A reduce-scatter would send as many bytes.
        """
        received = torch.empty_like(parts)
        with self._heartbeat.waiting("sums the gradients of keys and values"):
            dist.all_to_all_single(received, parts, group=self._group)
        self._trace.count_bytes("context", parts.nbytes - parts[0].nbytes)
        wide = torch.promote_types(parts.dtype, torch.float32)
        return received.sum(dim=0, dtype=wide).to(parts.dtype)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, cut: ContextCut, gather: ContextGather) -> Tensor:
        ctx.cut, ctx.gather = cut, gather
        return cut.joined(gather.all_gather(part))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.gather.sum_of_own(ctx.cut.parts(gradient)), None, None

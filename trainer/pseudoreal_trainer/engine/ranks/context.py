"""Exchanges of parts of sequences: over the context ranks keys and values, over the tensor ranks tokens.

The main thread calls them. On a GPU, autograd runs the backward pass of an exchange in its own thread of the device,
while the main thread waits for the gradients: so one thread at a time uses a group.
"""

from collections.abc import Callable
from typing import Any, Literal, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from pseudoreal_trainer.engine.ranks.process_groups import ProcessGroups
from pseudoreal_trainer.engine.ranks.trace import Trace
from pseudoreal_trainer.model.context import ContextCut

P = ParamSpec("P")
R = TypeVar("R")


class PartExchange:
    """Exchanges parts of sequences among ranks that have one part each. All of these ranks call it in plan order."""

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        traffic: Literal["context", "tensor"],
        groups: ProcessGroups,
        trace: Trace,
    ) -> None:
        """`group`: the ranks, in the order of their parts; None: this rank is alone."""
        self._group, self._traffic, self._trace = group, traffic, trace
        self._heartbeat = groups.ranks.heartbeat

    @property
    def _ranks(self) -> dist.ProcessGroup:
        # To torch, None is the group of all ranks.
        assert self._group is not None, "sequences are cut only over several ranks"
        return self._group

    def gather(self, cut: ContextCut, part: Tensor) -> Tensor:
        """Return whole sequences, [B, T / C, ...] -> [B, T, ...]. The backward pass returns to each rank the gradient
        of its part, summed over the ranks."""
        out: Tensor = _Gather.apply(part, cut, self)
        return out

    def sum_to_own(self, cut: ContextCut, whole: Tensor) -> Tensor:
        """Sum whole sequences over the ranks and return this rank's part of the sum, [B, T, ...] -> [B, T / C, ...].
        The backward pass gathers the gradients of all parts."""
        out: Tensor = _SumToOwn.apply(whole, cut, self)
        return out

    def all_gather(self, part: Tensor) -> Tensor:
        """Return the parts of all ranks, [...] -> [C, ...]."""
        part = part.contiguous()
        parts = part.new_empty(self._ranks.size(), *part.shape)
        with self._heartbeat.waiting("gathers parts of sequences"):
            dist.all_gather_into_tensor(parts.view(-1), part.view(-1), group=self._ranks)
        self._trace.count_bytes(self._traffic, parts.nbytes - part.nbytes)
        return parts

    def sum_of_own(self, parts: Tensor) -> Tensor:
        """Return this rank's part, summed over the ranks: [C, ...] -> [...].

        The sum is in at least float32, and in the order of the ranks, so it is rounded to bfloat16 only once, and has
        the same bits on every backend. A reduce-scatter would send as many bytes.
        """
        received = torch.empty_like(parts)
        with self._heartbeat.waiting("sums parts of sequences"):
            dist.all_to_all_single(received, parts, group=self._ranks)
        self._trace.count_bytes(self._traffic, parts.nbytes - parts[0].nbytes)
        wide = torch.promote_types(parts.dtype, torch.float32)
        return received.sum(dim=0, dtype=wide).to(parts.dtype)


def _uncompiled(function: Callable[P, R]) -> Callable[P, R]:
    """Exclude a function from torch.compile, which would trace its collectives."""
    found: Callable[P, R] = torch.compiler.disable(function)
    return found


class TensorExchange:
    """Exchanges of tokens among the tensor ranks (`model.tensor.TensorRanks`)."""

    def __init__(self, groups: ProcessGroups, trace: Trace) -> None:
        self.count, self.rank = groups.layout.tensor_ranks, groups.tensor_rank
        self._exchange = PartExchange(groups.tensor, "tensor", groups, trace)

    @_uncompiled
    def gather(self, own: Tensor) -> Tensor:
        return self._exchange.gather(self._cut(own.shape[1] * self.count), own)

    @_uncompiled
    def sum_to_own(self, summands: Tensor) -> Tensor:
        return self._exchange.sum_to_own(self._cut(summands.shape[1]), summands)

    @_uncompiled
    def gather_values(self, own: Tensor) -> Tensor:
        return self._cut(own.shape[1] * self.count).joined(self._exchange.all_gather(own))

    @_uncompiled
    def of_all(self, own: Tensor) -> Tensor:
        return self._exchange.all_gather(own)

    def _cut(self, length: int) -> ContextCut:
        return ContextCut(self.count, self.rank, length)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, cut: ContextCut, exchange: PartExchange) -> Tensor:
        ctx.cut, ctx.exchange = cut, exchange
        return cut.joined(exchange.all_gather(part))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.exchange.sum_of_own(ctx.cut.parts(gradient)), None, None


class _SumToOwn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, cut: ContextCut, exchange: PartExchange) -> Tensor:
        ctx.cut, ctx.exchange = cut, exchange
        return exchange.sum_of_own(cut.parts(whole))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.cut.joined(ctx.exchange.all_gather(gradient)), None, None

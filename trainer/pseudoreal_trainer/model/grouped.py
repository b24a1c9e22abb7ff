"""Experts in a few kernels for all of them, where a loop would launch some for each.

torch's grouped product wants its weights in one tensor. In the engine the parameters of a unit lie one behind the
other in one vector, and those of one kind of all experts equally far apart: seen with strides, they are one tensor.
Nothing is copied, and nothing is held besides what the loop holds.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from pseudoreal_trainer.model.feed_forward import FeedForward

_ALIGNMENT = 16
"""Alignment in bytes: every row of an operand begins at a multiple (torch.nn.functional.grouped_mm on CUDA)."""


def grouped_or_one_by_one(
    experts: Sequence[FeedForward], tokens: Tensor, counts: Tensor, sizes: Sequence[int]
) -> Tensor:
    """Outputs of experts: tokens [accepted, H], those of the first expert first, counts [n] -> [accepted, H]. An expert
    without tokens runs on none, and so has a gradient of zeros. `sizes` are `counts` on the host."""
    if can_group(tokens, experts):
        return grouped_feed_forward(experts, tokens, counts, sizes)
    return torch.cat([expert(part) for expert, part in zip(experts, tokens.split(list(sizes)), strict=True)])


def can_group(tokens: Tensor, experts: Sequence[FeedForward]) -> bool:
    """Whether torch has a kernel for these: bfloat16 without biases, on a GPU of compute capability 8.0 or more."""
    if experts[0].up.bias is not None:
        return False
    if not tokens.is_cuda or tokens.dtype is not torch.bfloat16 or not hasattr(F, "grouped_mm"):
        return False
    return torch.cuda.get_device_capability(tokens.device) >= (8, 0) and are_side_by_side(experts)


def are_side_by_side(experts: Sequence[FeedForward]) -> bool:
    """Whether the experts' matrices can be seen as one tensor, [n, out, in], whose rows are aligned."""
    kinds = [[expert.up.weight for expert in experts], [expert.down.weight for expert in experts]]
    if experts[0].gate is not None:
        kinds.append(_gates(experts))
    return all(_have_one_distance(weights) for weights in kinds)


def grouped_feed_forward(
    experts: Sequence[FeedForward], tokens: Tensor, counts: Tensor, sizes: Sequence[int]
) -> Tensor:
    """What FeedForward computes, for all experts: tokens [accepted, H] -> [accepted, H]; the first tokens are those of
    the first expert. counts [n], on the device of the tokens; `sizes` are the same on the host."""
    ends = counts.cumsum(0, dtype=torch.int32)

    def linear(features: Tensor, weights: list[Tensor]) -> Tensor:
        out: Tensor = _GroupedLinear.apply(features, ends, sizes, *weights)
        return out

    up = linear(tokens, [expert.up.weight for expert in experts])
    inner = F.gelu(up) if experts[0].gate is None else F.silu(linear(tokens, _gates(experts))) * up
    return linear(inner, [expert.down.weight for expert in experts])


class _GroupedLinear(torch.autograd.Function):
    """A linear layer for each expert: features [accepted, in], weights of n experts, each [out, in] -> [accepted,
    out]."""

    @staticmethod
    def forward(ctx: Any, features: Tensor, ends: Tensor, sizes: Sequence[int], *weights: Tensor) -> Tensor:
        ctx.save_for_backward(features, ends, *weights)
        ctx.sizes = sizes
        return F.grouped_mm(features, _as_one(weights).transpose(1, 2), offs=ends)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        features, ends, *weights = ctx.saved_tensors
        gradient = gradient.contiguous()
        of_features = F.grouped_mm(gradient, _as_one(weights), offs=ends)
        of_weights = F.grouped_mm(gradient.t(), features, offs=ends)  # [n, out, in]
        for expert, size in enumerate(ctx.sizes):
            if size == 0:
                of_weights[expert].zero_()  # a sum over no tokens, which not every kernel writes
        return of_features, None, None, *of_weights.unbind()


def _gates(experts: Sequence[FeedForward]) -> list[Tensor]:
    return [expert.gate.weight for expert in experts if expert.gate is not None]


def _as_one(weights: Sequence[Tensor]) -> Tensor:
    """A view of all weights as one tensor, [n, out, in]."""
    first = weights[0].detach()
    distance = (weights[1].data_ptr() - first.data_ptr()) // first.itemsize if len(weights) > 1 else first.numel()
    return first.as_strided((len(weights), *first.shape), (distance, *first.stride()))


def _have_one_distance(weights: Sequence[Tensor]) -> bool:
    addresses = [weight.data_ptr() for weight in weights]
    distance = addresses[1] - addresses[0] if len(addresses) > 1 else _ALIGNMENT
    row = weights[0].shape[-1] * weights[0].itemsize
    return (
        distance > 0
        and all(address == addresses[0] + index * distance for index, address in enumerate(addresses))
        and len({weight.untyped_storage().data_ptr() for weight in weights}) == 1
        and not any(number % _ALIGNMENT for number in (addresses[0], distance, row))
    )


def by_expert(counts: Tensor, rows: int) -> Tensor:
    """Where the rows of the first expert are, then those of the second, ...: [rows]. Rows come from rank after rank,
    each with those of the first expert first; of an expert they keep the order of the ranks, so that it computes on
    them in the order of the whole batch.

    counts: rows from each rank for each expert, [ranks, experts]; `rows`: their sum, which the host knows.
    """
    lengths = counts.t().flatten()  # expert after expert, of each rank after rank
    begins = _begins(counts.flatten()).view_as(counts).t().flatten()  # where these are now
    shifts = (begins - _begins(lengths)).repeat_interleave(lengths, output_size=rows)
    return shifts + torch.arange(rows, device=counts.device)


def _begins(lengths: Tensor) -> Tensor:
    return lengths.cumsum(0) - lengths

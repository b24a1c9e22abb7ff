"""The MLPs of a layer's experts. Each parameter is one tensor that stacks all experts. The experts run in grouped
kernels if torch has them, else one after the other."""

from collections.abc import Sequence
from typing import Any

import torch
from pseudoreal_api.spec.model import FeedForward as FeedForwardSpec
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from pseudoreal_trainer.accelerator.adapters import adapter_of
from pseudoreal_trainer.model.layers import activate

_ALIGNMENT = 16
"""Alignment in bytes: every row of an operand starts at a multiple (torch.nn.functional.grouped_mm)."""


class StackedLinear(nn.Module):
    """A linear layer for each of E experts. The parameters are uninitialised."""

    def __init__(self, experts: int, inputs: int, outputs: int, *, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, outputs, inputs))
        self.bias = nn.Parameter(torch.empty(experts, outputs)) if bias else None

    def forward(self, rows: Tensor, ends: Tensor, sizes: Sequence[int]) -> Tensor:
        """Apply each expert's layer to its rows: [rows, inputs] -> [rows, outputs]; rows of the first expert come
        first. `ends`: end of each expert's rows, [E], int32. `sizes`: number of rows of each expert, on the host."""
        is_grouped = self.bias is None and can_group(rows, self.weight)
        out: Tensor = _GroupedLinear.apply(rows, self.weight, self.bias, ends if is_grouped else None, sizes)
        return out


class StackedFeedForward(nn.Module):
    """`FeedForward` for each of E experts. A rank that holds only some experts binds only their part of each tensor."""

    def __init__(self, experts: int, hidden: int, spec: FeedForwardSpec) -> None:
        super().__init__()
        bias = spec.bias == "All"
        is_gated = spec.activation == "SwiGLU"
        self.gate = StackedLinear(experts, hidden, spec.size, bias=bias) if is_gated else None
        self.up = StackedLinear(experts, hidden, spec.size, bias=bias)
        self.down = StackedLinear(experts, spec.size, hidden, bias=bias)

    def outputs(self, rows: Tensor, counts: Tensor, sizes: Sequence[int]) -> Tensor:
        """Return the experts' outputs for rows, [rows, H] -> [rows, H]; rows of the first expert come first. counts
        [E], on the device of the rows; `sizes`: the same numbers on the host. An expert without rows has a gradient of
        zeros."""
        ends = counts.cumsum(0, dtype=torch.int32)
        up = self.up(rows, ends, sizes)
        gate = None if self.gate is None else self.gate(rows, ends, sizes)
        out: Tensor = self.down(activate(gate, up), ends, sizes)
        return out

    def use_weights_of(self, other: "StackedFeedForward") -> None:
        """Use the parameters of `other`."""
        self.gate, self.up, self.down = other.gate, other.up, other.down


def can_group(rows: Tensor, weight: Tensor) -> bool:
    """Return whether torch has a grouped kernel for the products of rows [rows, in] with each expert's part of the
    weight, [E, out, in]. The weight must be aligned. On a GPU: bfloat16, from compute capability 8.0 on. On a CPU:
    float32 and bfloat16."""
    aligned = (weight.data_ptr(), *(size * weight.itemsize for size in weight.shape[1:]))
    if not hasattr(F, "grouped_mm") or any(number % _ALIGNMENT for number in aligned):
        return False
    if rows.device.type == "cpu":
        return rows.dtype in (torch.float32, torch.bfloat16)
    return adapter_of(rows.device).can_group(rows.dtype)


class _GroupedLinear(torch.autograd.Function):
    """A linear layer for each expert: rows [rows, in], weight [E, out, in], bias [E, out] or none -> [rows, out].
    `ends`: end of each expert's rows, [E]; None: torch has no kernel for all experts at once.

    The backward pass is written by hand: autograd would allocate a gradient of the whole stacked tensor for each
    expert.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, ends: Tensor | None, sizes: Sequence[int]
    ) -> Tensor:
        ctx.save_for_backward(rows, weight, ends)
        ctx.sizes, ctx.has_bias = sizes, bias is not None
        return _multiply_rows(rows, weight.transpose(1, 2), bias, ends, sizes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, ends = ctx.saved_tensors
        gradient = gradient.contiguous()
        of_rows = _multiply_rows(gradient, weight, None, ends, ctx.sizes)
        of_weight = _weight_gradient(gradient, rows, ends, ctx.sizes)
        of_bias = _bias_gradient(gradient, ctx.sizes) if ctx.has_bias else None
        return of_rows, of_weight, of_bias, None, None


def _multiply_rows(
    rows: Tensor, matrices: Tensor, bias: Tensor | None, ends: Tensor | None, sizes: Sequence[int]
) -> Tensor:
    """Return each expert's rows times its matrix, plus its bias: [rows, in], [E, in, out], [E, out] -> [rows, out]."""
    if ends is not None:
        return F.grouped_mm(rows, matrices, offs=ends)
    out = rows.new_empty(len(rows), matrices.shape[2])
    parts = zip(rows.split([*sizes]), out.split([*sizes]), strict=True)
    for expert, (part, into) in enumerate(parts):
        if bias is None:
            torch.mm(part, matrices[expert], out=into)
        else:
            torch.addmm(bias[expert], part, matrices[expert], out=into)
    return out


def _weight_gradient(gradient: Tensor, rows: Tensor, ends: Tensor | None, sizes: Sequence[int]) -> Tensor:
    """Return the gradient of each expert's matrix, from its own rows: gradient [rows, out], [rows, in] -> [E, out,
    in]."""
    if ends is not None:
        out = F.grouped_mm(gradient.t(), rows, offs=ends)
        if idle := sum(size == 0 for size in sizes):
            # Not every kernel writes a sum over no rows. Which experts are idle is read on the device: an index made of
            # `sizes` would have to be copied there.
            is_idle = torch.diff(ends, prepend=ends.new_zeros(1)) == 0
            out.index_fill_(0, torch.nonzero_static(is_idle, size=idle).squeeze(1), 0)
        return out
    out = rows.new_empty(len(sizes), gradient.shape[1], rows.shape[1])
    for into, left, right in zip(out, gradient.split([*sizes]), rows.split([*sizes]), strict=True):
        torch.mm(left.t(), right, out=into)
    return out


def _bias_gradient(gradient: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return each expert's sum over its rows: [rows, out] -> [E, out]."""
    return torch.stack([part.sum(0) for part in gradient.split([*sizes])])


def rows_by_expert(counts: Tensor, rows: int) -> Tensor:
    """Return the indices of the rows of the first expert, then of the second, ...: [rows].

    Rows arrive rank after rank, and from each rank expert after expert. The rows of an expert keep the order of the
    ranks, so that the expert computes on them in the order of the whole batch.

    counts: rows from each rank for each expert, [ranks, experts]; `rows`: sum of `counts`, known on the host.
    """
    lengths = counts.t().flatten()  # expert after expert, and for each of them rank after rank
    starts = _starts(counts.flatten()).view_as(counts).t().flatten()  # current starts of these rows
    shifts = (starts - _starts(lengths)).repeat_interleave(lengths, output_size=rows)
    return shifts + torch.arange(rows, device=counts.device)


def _starts(lengths: Tensor) -> Tensor:
    return lengths.cumsum(0) - lengths

"""Parts of a layer: the norm and the MLP."""

from typing import Any

import torch
from pseudoreal_api.spec.model import FeedForward as FeedForwardSpec
from pseudoreal_api.spec.model import Model
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from pseudoreal_trainer.model.float8 import Float8Linear, Product, gradient_of_inputs
from pseudoreal_trainer.model.recomputation import mark_recomputed


def rms_norm(spec: Model, size: int) -> nn.RMSNorm:
    """Return a root-mean-square norm over `size` features (Zhang and Sennrich 2019, arXiv 1910.07467)."""
    return nn.RMSNorm(size, eps=float(spec.norm.epsilon))


class FeedForward(nn.Module):
    """MLP. GELU: down(gelu(up(x))). SwiGLU: down(silu(gate(x)) * up(x)) (Shazeer 2020, "GLU variants")."""

    def __init__(self, hidden: int, spec: FeedForwardSpec, linear: type[nn.Linear] = nn.Linear) -> None:
        """`linear`: class of the linear layers."""
        super().__init__()
        bias = spec.bias == "All"
        self.gate = linear(hidden, spec.size, bias=bias) if spec.activation == "SwiGLU" else None
        self.up = linear(hidden, spec.size, bias=bias)
        self.down = linear(spec.size, hidden, bias=bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the MLP's output: [..., H] -> [..., H]."""
        out: Tensor = self.down(self._activated(hidden))
        return out

    def unread_sum(self, residual: Tensor, hidden: Tensor) -> Tensor:
        """Return a tensor with the graph of `residual + self(hidden)`, [..., H], but without its values: no gradient
        depends on them, so a pass that is recomputed for its gradients need not multiply by `down`."""
        product = self.down.product if isinstance(self.down, Float8Linear) else None
        out: Tensor = _UnreadSum.apply(residual, self._activated(hidden), self.down.weight, self.down.bias, product)
        return out

    def _activated(self, hidden: Tensor) -> Tensor:
        gate = None if self.gate is None else self.gate(hidden)
        return activate(gate, self.up(hidden))


class _UnreadSum(torch.autograd.Function):
    """residual [..., H] + activated [..., F] times weight [H, F], plus bias [H] or none. The output has the sum's shape
    and one element of memory. `product`: product in float8 for the gradient of the activations; None: in the dtype of
    the operands."""

    @staticmethod
    def forward(
        ctx: Any,
        residual: Tensor,
        activated: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        product: Product | None,
    ) -> Tensor:
        ctx.save_for_backward(activated, weight)
        ctx.has_bias, ctx.product = bias is not None, product
        return residual.new_empty(()).expand(residual.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        activated, weight = ctx.saved_tensors
        # The products that autograd computes for torch's linear layer, so that the gradients have the same bits.
        rows, inputs = gradient.flatten(0, -2), activated.flatten(0, -2)
        of_bias = rows.sum(0) if ctx.has_bias else None
        of_activated = rows.mm(weight) if ctx.product is None else gradient_of_inputs(ctx.product, rows, weight)
        return gradient, of_activated.view_as(activated), rows.t().mm(inputs), of_bias, None


def activate(gate: Tensor | None, up: Tensor) -> Tensor:
    """Return the input of an MLP's last product, gelu(up) or silu(gate) * up: [..., F] -> [..., F]. Selective
    recomputation keeps only `gate` and `up`."""
    if gate is None:
        return mark_recomputed(F.gelu(up), F.gelu, up)
    activated = mark_recomputed(F.silu(gate), F.silu, gate)
    return mark_recomputed(activated * up, _gated, gate, up)


def _gated(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up

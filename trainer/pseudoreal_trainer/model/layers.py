"""Parts of a layer: the norm and the MLP."""

from collections.abc import Callable
from typing import Any

import torch
from pseudoreal_api.spec.model import FeedForward as FeedForwardSpec
from pseudoreal_api.spec.model import Model
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from pseudoreal_trainer.model.float8 import Float8Linear, Product, gradient_of_inputs
from pseudoreal_trainer.model.recomputation import mark_recomputed
from pseudoreal_trainer.model.tensor import TensorRanks, sliced_mlp


def rms_norm(spec: Model, size: int) -> nn.RMSNorm:
    """Return a root-mean-square norm over `size` features (Zhang and Sennrich 2019, arXiv 1910.07467)."""
    return nn.RMSNorm(size, eps=float(spec.norm.epsilon))


class FeedForward(nn.Module):
    """MLP. GELU: down(gelu(up(x))). SwiGLU: down(silu(gate(x)) * up(x)) (Shazeer 2020, "GLU variants")."""

    def __init__(
        self,
        hidden: int,
        whole: FeedForwardSpec,
        linear: type[nn.Linear] = nn.Linear,
        tensor_ranks: TensorRanks | None = None,
    ) -> None:
        """`linear`: class of the linear layers. `tensor_ranks`: ranks with the other hidden features; None: this rank
        has all features."""
        super().__init__()
        spec, self._tensor_ranks = sliced_mlp(whole, tensor_ranks), tensor_ranks
        bias = spec.bias == "All"
        self.gate = linear(hidden, spec.size, bias=bias) if spec.activation == "SwiGLU" else None
        self.up = linear(hidden, spec.size, bias=bias)
        self.down = linear(spec.size, hidden, bias=bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the MLP's output: [..., H] -> [..., H]."""
        return project(self.down, self._activated(hidden), self._tensor_ranks)

    def unread_sum(self, residual: Tensor, hidden: Tensor) -> Tensor:
        """Return a tensor with the graph of `residual + self(hidden)`, [..., H], but without its values: no gradient
        depends on them, so a pass that is recomputed for its gradients need not multiply by `down`."""
        product = self.down.product if isinstance(self.down, Float8Linear) else None
        whole = None if self._tensor_ranks is None else self._tensor_ranks.gather_values
        down = self.down
        out: Tensor = _UnreadSum.apply(residual, self._activated(hidden), down.weight, down.bias, product, whole)
        return out

    def _activated(self, hidden: Tensor) -> Tensor:
        if self._tensor_ranks is not None:
            hidden = self._tensor_ranks.gather(hidden)
        gate = None if self.gate is None else self.gate(hidden)
        return activate(gate, self.up(hidden))


class _UnreadSum(torch.autograd.Function):
    """residual [..., H] + activated [..., F] times weight [H, F], plus bias [H] or none. The output has the sum's shape
    and one element of memory. `product`: product in float8 for the gradient of the activations; None: in the dtype of
    the operands. `whole`: gathers the gradient over the tensor ranks, [B, L, H] -> [B, K L, H], because `activated` has
    the tokens of all of them; None: no tensor ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        residual: Tensor,
        activated: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        product: Product | None,
        whole: Callable[[Tensor], Tensor] | None,
    ) -> Tensor:
        ctx.save_for_backward(activated, weight)
        ctx.has_bias, ctx.product, ctx.whole = bias is not None, product, whole
        return residual.new_empty(()).expand(residual.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        activated, weight = ctx.saved_tensors
        # The products that autograd computes for torch's linear layer, so that the gradients have the same bits.
        of_bias = gradient.flatten(0, -2).sum(0) if ctx.has_bias else None
        of_all = gradient if ctx.whole is None else ctx.whole(gradient)
        rows, inputs = of_all.flatten(0, -2), activated.flatten(0, -2)
        of_activated = rows.mm(weight) if ctx.product is None else gradient_of_inputs(ctx.product, rows, weight)
        return gradient, of_activated.view_as(activated), rows.t().mm(inputs), of_bias, None, None


def project(linear: nn.Linear, features: Tensor, tensor_ranks: TensorRanks | None) -> Tensor:
    """Return the product with the last matrix of attention or of an MLP, plus bias, for this rank's tokens: [B, K L, F]
    -> [B, L, H]. `features`: this rank's features of the tokens of all K tensor ranks; without `tensor_ranks`, K = 1.
    The bias is added once, to the sum over the ranks."""
    if tensor_ranks is None:
        out: Tensor = linear(features)
        return out
    summed = tensor_ranks.sum_to_own(F.linear(features, linear.weight))
    return summed if linear.bias is None else summed + linear.bias


def activate(gate: Tensor | None, up: Tensor) -> Tensor:
    """Return the input of an MLP's last product, gelu(up) or silu(gate) * up: [..., F] -> [..., F]. Selective
    recomputation keeps only `gate` and `up`."""
    if gate is None:
        return mark_recomputed(F.gelu(up), F.gelu, up)
    activated = mark_recomputed(F.silu(gate), F.silu, gate)
    return mark_recomputed(activated * up, _gated, gate, up)


def _gated(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up

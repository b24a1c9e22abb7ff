"""Linear layers with matrix products in float8: operands in e4m3 (4 bits of exponent, 3 of mantissa, at most 448).

Each row of an operand is divided by a power of two, so that its largest magnitude is at most 448, and then rounded to
the nearest e4m3 number. Rows run along the features over which the product sums. So a token's output does not depend on
the other tokens of its micro-batch, and is the same in every layout. A power of two scales without rounding.

The forward pass and the gradient of the inputs round both operands. The gradient of the weight sums over tokens with
different scales, so its operands are not rounded (the recipe `rowwise_with_gw_hp` of torchao). If the device has no
float8 product for the dtype or the sizes, the rounded numbers are multiplied in the compute dtype: the same sums, up to
the rounding of sums.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from pseudoreal_trainer.accelerator.adapters import adapter_of

MOST = 448.0
"""Largest e4m3 number."""
_STEP = 16
"""Float8 products on a device need k and m of a `Product` to be multiples of this number; n may be any number."""


Product = Callable[[Tensor, Tensor], Tensor]
"""Returns left [n, k] times the transpose of right [m, k], with the rows of both in float8: [n, m]."""


def multiply_rounded(left: Tensor, right: Tensor) -> Tensor:
    """Return the product of the rounded numbers, computed in their dtype: a `Product`."""
    return rounded(left).mm(rounded(right).t())


def multiply_scaled(left: Tensor, right: Tensor) -> Tensor:
    """Return the product, computed by the device in float8 if the device takes the sizes: a `Product`. The device must
    have no `obstacle`."""
    fits = left.shape[1] % _STEP == right.shape[0] % _STEP == 0
    return _on_device(left, right) if fits and len(left) else multiply_rounded(left, right)


class Float8Linear(nn.Linear):
    """A linear layer with products in float8, computed from the rounded numbers in the compute dtype."""

    product: Product = staticmethod(multiply_rounded)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return [..., out] for inputs [..., in]."""
        out: Tensor = _Float8Linear.apply(inputs, self.weight, self.bias, self.product)
        return out


class ScaledFloat8Linear(Float8Linear):
    """A linear layer with products that the device computes in float8."""

    product: Product = staticmethod(multiply_scaled)


def float8_linear(device: torch.device, dtype: torch.dtype) -> type[Float8Linear]:
    """Return the class of linear layers for a device and a compute dtype. Called once, when modules are built: compiled
    blocks cannot look for obstacles."""
    return ScaledFloat8Linear if obstacle(device, dtype) is None else Float8Linear


class _Float8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None, product: Product) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.has_bias, ctx.product = bias is not None, product
        out = product(inputs.flatten(0, -2), weight)
        if bias is not None:
            out += bias
        return out.view(*inputs.shape[:-1], len(weight))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        rows = gradient.flatten(0, -2)
        of_bias = rows.sum(0) if ctx.has_bias else None
        of_inputs = gradient_of_inputs(ctx.product, rows, weight).view_as(inputs)
        return of_inputs, rows.t().mm(inputs.flatten(0, -2)), of_bias, None


def gradient_of_inputs(product: Product, rows: Tensor, weight: Tensor) -> Tensor:
    """Return the gradient of a linear layer's inputs, [n, in], for the gradient of its outputs, `rows` [n, out]."""
    return product(rows, weight.t())


def rounded(rows: Tensor) -> Tensor:
    """Return the rows with each number rounded to the nearest e4m3 number times the row's scale (`_scales`): [n, k] ->
    [n, k], in the dtype of the rows. A row with a NaN or an infinity becomes all NaN. In float64, row / scale is first
    rounded to float32, because torch converts float64 to float8 by way of float32."""
    scales = _scales(rows)
    return (rows / scales).to(torch.float8_e4m3fn).to(rows.dtype) * scales


def _scales(rows: Tensor) -> Tensor:
    """Return the scale of each row, [n, 1], in the dtype of the rows: the smallest power of two, among the dtype's
    normal numbers, with all magnitudes of row / scale at most `MOST`; 1 for a row of zeros. `rows`: [n, k]."""
    wide = torch.promote_types(rows.dtype, torch.float32)
    share = rows.abs().amax(dim=-1, keepdim=True).to(wide) / MOST
    mantissa, _ = torch.frexp(share)  # from 0.5 up to 1
    # A number divided by its mantissa is a power of two, exactly.
    power = torch.where(mantissa == 0.5, share, share / mantissa)
    # In bfloat16, lesser powers would be rounded to 0.
    least = torch.finfo(rows.dtype).tiny
    return torch.where(share == 0, 1.0, power.clamp(min=least)).to(rows.dtype)


def _on_device(left: Tensor, right: Tensor) -> Tensor:
    of_left, of_right = _scales(left), _scales(right)
    kind = F.ScalingType.RowWise
    # The kernels want the first matrix by rows and the second by columns; a transposed weight is neither.
    out: Tensor = F.scaled_mm(
        (left / of_left).to(torch.float8_e4m3fn).contiguous(),
        (right / of_right).to(torch.float8_e4m3fn).contiguous().t(),
        of_left.float(),
        kind,
        of_right.float().t(),
        kind,
        output_dtype=left.dtype,
    )
    return out


@cache
def obstacle(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why products in float8 are computed in the compute dtype, `dtype`; None if the device computes them in
    float8.

    No such device has run this code. So first products, with a matrix as it is and transposed, are compared with
    products of the rounded numbers.
    """
    if not adapter_of(device).can_multiply_float8():
        return "the device has no products in float8"
    if dtype != torch.bfloat16:
        return f"products in float8 have bfloat16 results, and the phase computes in {dtype}"
    drawn = torch.Generator(device).manual_seed(1)
    left, right = (
        torch.randn(rows, 4 * _STEP, generator=drawn, device=device, dtype=torch.bfloat16) for rows in (64, 2 * _STEP)
    )
    expected = rounded(left).float().mm(rounded(right).float().t())
    for same in (right, right.t().contiguous().t()):
        try:
            found = _on_device(left, same)
        except (RuntimeError, ValueError, TypeError, AttributeError) as error:
            return f"torch {torch.__version__} refuses a product in float8 on this GPU: {error}"
        if not torch.allclose(found.float(), expected, rtol=2**-7, atol=2**-7 * float(expected.abs().max())):
            return f"torch {torch.__version__} computes other products in float8 on this GPU than of rounded numbers"
    return None

"""Linear layers whose products have operands in float8 (e4m3: 4 bits of exponent, 3 of mantissa, at most 448).

Each row of an operand is divided by a power of two, so that its largest magnitude is at most 448, and then rounded to
the nearest number of the format. Rows run along the features over which the product sums. So a token's output does not
depend on the other tokens of its micro-batch, and is the same in every layout. A power of two scales without rounding.

The forward pass and the gradient of the inputs round both operands. The gradient of the weight sums over tokens, which
have different scales, so its operands are not rounded (the recipe `rowwise_with_gw_hp` of torchao). Devices without
such products multiply the rounded numbers in the compute dtype: the same sums, up to the rounding of sums.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from pseudoreal_trainer.accelerator.adapters import adapter_of

MOST = 448.0
"""Largest number of the format."""
_STEP = 16
"""Products of a device need sizes that are multiples of this number."""


class Float8Linear(nn.Linear):
    """A linear layer with products in float8."""

    def forward(self, inputs: Tensor) -> Tensor:
        """Return [..., out] for inputs [..., in]."""
        out: Tensor = _Float8Linear.apply(inputs, self.weight, self.bias)
        return out


class _Float8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.has_bias = bias is not None
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
        return gradient_of_inputs(rows, weight).view_as(inputs), rows.t().mm(inputs.flatten(0, -2)), of_bias


def gradient_of_inputs(rows: Tensor, weight: Tensor) -> Tensor:
    """Return the gradient of a linear layer's inputs, [n, in], for the gradient of its outputs, `rows` [n, out]."""
    return product(rows, weight.t())


def product(left: Tensor, right: Tensor) -> Tensor:
    """Return left [n, k] times the transpose of right [m, k], with the rows of both in float8: [n, m]."""
    fits = left.dtype == torch.bfloat16 and left.shape[1] % _STEP == right.shape[0] % _STEP == 0
    if fits and len(left) and obstacle(left.device) is None:
        return _on_device(left, right)
    return rounded(left).mm(rounded(right).t())


def rounded(rows: Tensor) -> Tensor:
    """Return the numbers to which the rows are rounded, [n, k], in the dtype of the rows. A row with a NaN or an
    infinity has NaNs. Torch converts float64 by way of float32."""
    scales = _scales(rows)
    return (rows / scales).to(torch.float8_e4m3fn).to(rows.dtype) * scales


def _scales(rows: Tensor) -> Tensor:
    """Return the powers of two by which rows [n, k] are divided, [n, 1], in the dtype of the rows: the smallest that
    leave no magnitude above `MOST`, and are normal numbers of the dtype."""
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
def obstacle(device: torch.device) -> str | None:
    """Return why products in float8 are computed in the compute dtype on this device; None if the device computes them.

    No such device has run this code. So first products, with a matrix as it is and transposed, are compared with
    products of the rounded numbers.
    """
    if not adapter_of(device).can_multiply_float8():
        return "the device has no products in float8"
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

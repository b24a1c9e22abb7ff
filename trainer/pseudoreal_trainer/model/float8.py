"""Linear layers with matrix products in float8: operands in e4m3 (4 bits of exponent, 3 of mantissa, at most 448).

Each row of an operand (`Float8`), or each block of 32 numbers of a row (`MXFP8`, OCP Microscaling Formats 1.0), is
divided by a power of two, so that its largest magnitude is at most 448, and then rounded to the nearest e4m3 number.
Rows run along the features over which the product sums. So a token's output does not depend on the other tokens of its
micro-batch, and is the same in every layout. A power of two scales without rounding.

The forward pass and the gradient of the inputs round both operands. The gradient of the weight sums over tokens with
different scales, so its operands are not rounded (the recipe `rowwise_with_gw_hp` of torchao). If the device has no
float8 product for the dtype or the sizes, the rounded numbers are multiplied in the compute dtype: the same sums, up to
the rounding of sums.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from pseudoreal_api.spec.optimizer import PRODUCT_BLOCK, ProductFormat
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from pseudoreal_trainer.accelerator.adapters import adapter_of

MOST = 448.0
"""Largest e4m3 number."""
_STEP = 16
"""Products on a device need k and m of a `Product` to be multiples of this number; n may be any number. With scaled
blocks, k must be a multiple of PRODUCT_BLOCK."""

Product = Callable[[Tensor, Tensor], Tensor]
"""Returns left [n, k] times the transpose of right [m, k], with the rows of both in float8: [n, m]."""


def multiply_rounded(left: Tensor, right: Tensor) -> Tensor:
    """Return the product of the rounded rows, computed in their dtype: a `Product`."""
    return rounded(left).mm(rounded(right).t())


def multiply_rounded_blocks(left: Tensor, right: Tensor) -> Tensor:
    """Return the product of the rounded blocks, computed in their dtype: a `Product`."""
    return rounded_blocks(left).mm(rounded_blocks(right).t())


def multiply_scaled(left: Tensor, right: Tensor) -> Tensor:
    """Return the product of scaled rows, computed by the device in float8 if the device takes the sizes: a `Product`.
    The device must have no `obstacle`."""
    fits = left.shape[1] % _STEP == right.shape[0] % _STEP == 0
    return _rows_on_device(left, right) if fits and len(left) else multiply_rounded(left, right)


def multiply_scaled_blocks(left: Tensor, right: Tensor) -> Tensor:
    """Return the product of scaled blocks, computed by the device in float8 if the device takes the sizes: a `Product`.
    The device must have no `obstacle`."""
    fits = left.shape[1] % PRODUCT_BLOCK == right.shape[0] % _STEP == 0
    return _blocks_on_device(left, right) if fits and len(left) else multiply_rounded_blocks(left, right)


class Float8Linear(nn.Linear):
    """A linear layer with products of rows in float8, computed from the rounded numbers in the compute dtype."""

    product: Product = staticmethod(multiply_rounded)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return [..., out] for inputs [..., in]."""
        out: Tensor = _Float8Linear.apply(inputs, self.weight, self.bias, self.product)
        return out


class ScaledFloat8Linear(Float8Linear):
    """A linear layer with products of scaled rows that the device computes in float8."""

    product: Product = staticmethod(multiply_scaled)


class MXFP8Linear(Float8Linear):
    """A linear layer with products of blocks in float8, computed from the rounded numbers in the compute dtype."""

    product: Product = staticmethod(multiply_rounded_blocks)


class ScaledMXFP8Linear(Float8Linear):
    """A linear layer with products of scaled blocks that the device computes in float8."""

    product: Product = staticmethod(multiply_scaled_blocks)


def linear_of(products: ProductFormat, device: torch.device, dtype: torch.dtype) -> type[nn.Linear]:
    """Return the class of linear layers for a format of products, a device and a compute dtype. Called once, when
    modules are built: compiled blocks cannot look for obstacles."""
    if products == "Compute":
        return nn.Linear
    is_device_able = obstacle(products, device, dtype) is None
    if products == "MXFP8":
        return ScaledMXFP8Linear if is_device_able else MXFP8Linear
    return ScaledFloat8Linear if is_device_able else Float8Linear


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


def rounded_blocks(rows: Tensor) -> Tensor:
    """Return the rows with each block of PRODUCT_BLOCK numbers rounded as `rounded` rounds a row: [n, k] -> [n, k]."""
    return rounded(_in_blocks(rows)).view(len(rows), _filled(rows.shape[1]))[:, : rows.shape[1]]


def _filled(length: int) -> int:
    """Return the number of elements of a row of this length, filled up to whole blocks."""
    return -(-length // PRODUCT_BLOCK) * PRODUCT_BLOCK


def _in_blocks(rows: Tensor) -> Tensor:
    """Return the blocks of the rows, [n, k] -> [n * ceil(k / PRODUCT_BLOCK), PRODUCT_BLOCK]. The last block of a row is
    filled with zeros."""
    return F.pad(rows, (0, _filled(rows.shape[1]) - rows.shape[1])).reshape(-1, PRODUCT_BLOCK)


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


def _rows_on_device(left: Tensor, right: Tensor) -> Tensor:
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


def _blocks_on_device(left: Tensor, right: Tensor) -> Tensor:
    (of_left, scales_left), (of_right, scales_right) = map(_scaled_blocks, (left, right))
    kind, order = F.ScalingType.BlockWise1x32, F.SwizzleType.SWIZZLE_32_4_4
    out: Tensor = F.scaled_mm(
        of_left,
        of_right.t(),
        scales_left,
        kind,
        scales_right,
        kind,
        swizzle_a=order,
        swizzle_b=order,
        output_dtype=left.dtype,
    )
    return out


def _scaled_blocks(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows [n, k] divided by the scales of their blocks, in e4m3, and the scales in e8m0, in the order of
    the kernels: tiles of 128 rows by 4 blocks, in a tile first the row modulo 32, then the row // 32, then the block.
    The last tiles are filled with ones."""
    blocks = _in_blocks(rows)
    scales = _scales(blocks)
    found = (blocks / scales).to(torch.float8_e4m3fn).view(rows.shape)
    by_rows = scales.view(len(rows), -1)
    filled = F.pad(by_rows, (0, -by_rows.shape[1] % 4, 0, -len(rows) % 128), value=1.0)
    tiles = filled.view(len(filled) // 128, 4, 32, filled.shape[1] // 4, 4).permute(0, 3, 2, 1, 4)
    return found, tiles.flatten().to(torch.float8_e8m0fnu)


@cache
def obstacle(products: ProductFormat, device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why products in float8 are computed in the compute dtype, `dtype`; None if the device computes them in
    float8. `products`: Float8 or MXFP8.

    No such device has run this code. So first products, with a matrix as it is and transposed, are compared with
    products of the rounded numbers.
    """
    adapter, in_blocks = adapter_of(device), products == "MXFP8"
    if not (adapter.can_multiply_mxfp8() if in_blocks else adapter.can_multiply_float8()):
        return f"the device has no products in float8 with scaled {'blocks' if in_blocks else 'rows'}"
    if dtype != torch.bfloat16:
        return f"products in float8 have bfloat16 results, and the phase computes in {dtype}"
    drawn = torch.Generator(device).manual_seed(1)
    left, right = (
        torch.randn(rows, 5 * PRODUCT_BLOCK, generator=drawn, device=device, dtype=torch.bfloat16)
        for rows in (70, 9 * _STEP)
    )
    exact, multiply = (multiply_rounded_blocks, _blocks_on_device) if in_blocks else (multiply_rounded, _rows_on_device)
    expected = exact(left.float(), right.float())
    for same in (right, right.t().contiguous().t()):
        try:
            found = multiply(left, same)
        except (RuntimeError, ValueError, TypeError, AttributeError) as error:
            return f"torch {torch.__version__} refuses a product in float8 on this GPU: {error}"
        if not torch.allclose(found.float(), expected, rtol=2**-7, atol=2**-7 * float(expected.abs().max())):
            return f"torch {torch.__version__} computes other products in float8 on this GPU than of rounded numbers"
    return None

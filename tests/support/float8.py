"""Products in float8, from the definition of e4m3: an oracle independent of the trainer's code.

The numbers of e4m3 are listed from their bits, and each number is rounded by a search in the list.
"""

from itertools import pairwise
from math import ceil, log2
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F


def _numbers() -> list[float]:
    """Return the e4m3 numbers from 0 up, ascending: 4 bits of exponent with bias 7, 3 bits of mantissa; the largest
    exponent with the largest mantissa is NaN."""
    small = [mantissa / 8 * 2.0**-6 for mantissa in range(8)]
    rest = [(1 + mantissa / 8) * 2.0 ** (exponent - 7) for exponent in range(1, 16) for mantissa in range(8)]
    return (small + rest)[:-1]


NUMBERS = _numbers()
_MIDDLES = np.array([(low + high) / 2 for low, high in pairwise(NUMBERS)])
"""Entry i: the number half-way between entries i and i + 1 of NUMBERS."""


def nearest(values: NDArray[Any]) -> NDArray[Any]:
    """Return the nearest numbers of the format, of two equally near ones the one with an even mantissa. The magnitude
    of `values` is at most the largest number."""
    magnitude = np.abs(values)
    low, high = (np.searchsorted(_MIDDLES, magnitude, side=side) for side in ("left", "right"))
    index = np.where((low != high) & (low % 2 == 1), high, low)
    found: NDArray[Any] = np.array(NUMBERS)[index] * np.sign(values)
    return found


def round_rows(rows: Tensor, block: int | None = None) -> Tensor:
    """Return the rows [n, k] rounded to e4m3 numbers times the row's scale: the smallest power of two with all
    magnitudes of row / scale at most 448. Scaled rows are rounded to float32 before e4m3, as in torch's conversion of
    float64. `block`: number of neighbouring elements of a row with one scale; None: all."""
    if block is not None:
        return torch.cat([round_rows(part) for part in rows.split(block, dim=1)], dim=1)
    found = rows.detach().double().numpy()
    powers = [2.0 ** ceil(log2(most / 448)) if (most := float(np.abs(row).max(initial=0))) else 1.0 for row in found]
    scales = np.array(powers)[:, None]
    return torch.from_numpy(nearest((found / scales).astype(np.float32).astype(np.float64)) * scales).to(rows.dtype)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None, block: int | None) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.block = block
        rows = inputs.reshape(-1, inputs.shape[-1])
        return F.linear(round_rows(rows, block), round_rows(weight, block), bias).reshape(*inputs.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        rows = gradient.reshape(-1, gradient.shape[-1])
        of_inputs = round_rows(rows, ctx.block) @ round_rows(weight.T.contiguous(), ctx.block).T
        of_weight = rows.T @ inputs.reshape(-1, inputs.shape[-1])
        return of_inputs.reshape(inputs.shape), of_weight, rows.sum(0), None


def round_products(model: nn.Module, products: str) -> None:
    """Make the linear layers in the blocks of a plain model, but not their routers, multiply in the format
    `products`."""
    if products == "Compute":
        return
    block = {"Float8": None, "MXFP8": 32}[products]
    for name, module in model.named_modules():
        if type(module) is nn.Linear and name.startswith("blocks."):
            _replace(module, block)


def _replace(module: nn.Linear, block: int | None) -> None:
    def forward(inputs: Tensor) -> Tensor:
        bias = module.bias if module.bias is not None else torch.zeros(module.out_features, dtype=inputs.dtype)
        out: Tensor = _Linear.apply(inputs, module.weight, bias, block)
        return out

    module.forward = forward  # type: ignore[method-assign, assignment]

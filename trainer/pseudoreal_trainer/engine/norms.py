"""Squares and dot products of long vectors, without the errors of a sum in float32.

On the CPU, torch adds up all elements of a float32 vector in a few accumulators. Each term is rounded to the resolution
of its accumulator, which gets coarser with the length of the vector: the norm of 2^28 elements is 2 % too small. The
error depends on how many ranks share the vector. GPUs add up in blocks, where the error stays small.
"""

import torch
from torch import Tensor

_ROW = 128
"""Elements per row. A row is summed in float32. The norm of one row has a relative error of 3e-7; over many rows the
error is smaller."""
_CHUNK = 1 << 22
"""Elements per chunk. Bounds the memory for the norms of a chunk's rows."""
_WIDE_CHUNK = 1 << 18
"""Elements that are copied to float64 at a time."""


def square_of(vector: Tensor) -> float:
    """Return the sum of the squares of a vector's elements. Its square root has a relative error of at most 1e-6 for
    vectors of any length."""
    if not _is_rounded(vector):
        return float(torch.linalg.vector_norm(vector)) ** 2
    return sum(map(_square, vector.split(_CHUNK)))


def _square(chunk: Tensor) -> float:
    rows, rest = chunk.split([len(chunk) // _ROW * _ROW, len(chunk) % _ROW])
    norms = torch.linalg.vector_norm(rows.view(-1, _ROW), dim=1)
    return float(norms.double().square().sum()) + float(torch.linalg.vector_norm(rest)) ** 2


def dot(left: Tensor, right: Tensor) -> Tensor:
    """Return the dot product, a float64 scalar."""
    if not _is_rounded(left):
        return torch.dot(left, right).double()
    total = torch.zeros((), dtype=torch.float64)
    for one, other in zip(left.split(_WIDE_CHUNK), right.split(_WIDE_CHUNK), strict=True):
        total += torch.dot(one.double(), other.double())
    return total


def _is_rounded(vector: Tensor) -> bool:
    return vector.device.type == "cpu" and vector.dtype != torch.float64

"""Slices of a matrix's columns, read from a matrix that is flattened row by row. Uses numpy arrays, not torch."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

_CHUNK = 1 << 22
"""Number of elements of whole rows in memory at a time; at least one row."""


def read_in_slice(
    read: Callable[[int, int], NDArray[Any]], shape: tuple[int, ...], slices: int, begin: int, end: int
) -> NDArray[Any]:
    """Return elements begin..end-1 of the flattened slices of a matrix's columns, in newly allocated memory.

    The indices count the elements of one slice after the other; the range is in one slice. `read`: returns elements of
    the matrix, flattened row by row. It reads whole rows: `slices` times as many elements as needed. `shape`: shape of
    the matrix; the number of columns is a multiple of `slices`.
    """
    rows, columns = shape
    width = columns // slices
    number = begin // (rows * width)
    own = slice(number * width, (number + 1) * width)
    first, last = begin - number * rows * width, end - number * rows * width  # within the slice
    assert last <= rows * width, "the range is in one slice"
    found, step = [], max(1, _CHUNK // columns)
    for row in range(first // width, -(-last // width), step):
        stop = min(row + step, -(-last // width))
        found.append(read(row * columns, stop * columns).reshape(-1, columns)[:, own])
    before = first % width
    return np.concatenate(found).reshape(-1)[before : before + end - begin]

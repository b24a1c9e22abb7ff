"""Numbers in the types of tensor files. numpy lacks bfloat16, so its bits are stored as uint16."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

_BITS = {"float64": np.float64, "float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}
_QUIET = 0x40
"""Quiet bit of a bfloat16. It keeps a NaN from becoming an infinity when the lower bits are cut off."""


def empty(count: int, dtype: str) -> Array:
    """Return uninitialised memory for `count` numbers of the type."""
    return np.empty(count, _BITS[dtype])


def widen(numbers: Array, dtype: str, to: str) -> Array:
    """Convert numbers of the type `dtype` to the type `to`, which represents each of them exactly."""
    if dtype == "bfloat16":
        numbers = (numbers.astype(np.uint32) << 16).view(np.float32)
    return numbers.astype(to, copy=False)


def narrow(numbers: Array, to: str) -> Array:
    """Return the numbers rounded to the type `to`, ties to even."""
    if to != "bfloat16":
        return numbers.astype(_BITS[to], copy=False)
    single = numbers.astype(np.float32, copy=False)
    bits: Array = np.ascontiguousarray(single).view(np.uint32)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    found: Array = np.where(np.isnan(single), (bits >> 16) | _QUIET, rounded).astype(np.uint16)
    return found

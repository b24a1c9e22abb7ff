"""Fewer points of a curve, with every extreme kept. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]
"""Values of a curve, one for each step; NaN where a step has none."""
Indices = NDArray[np.intp]


@dataclass(frozen=True)
class Bucket:
    """Steps that stand together in a table: the curve's values in them."""

    first: int
    """Index of the first step with a value."""
    last: int
    mean: float
    lowest: float
    highest: float


def kept_points(values: Values, most: int) -> Indices:
    """Return the indices of at most `most` points, in order. Points without a value are left out.

    Of each of several ranges of equally many points, the first, the lowest, the highest and the last are kept, so a
    spike of one step stays visible, however long the curve is. `most` is at least 4.
    """
    points = np.flatnonzero(np.isfinite(values))
    if len(points) <= most:
        return points
    kept = [
        edge
        for part in np.array_split(points, most // 4)
        for edge in (part[0], part[values[part].argmin()], part[values[part].argmax()], part[-1])
    ]
    return np.unique(np.array(kept))


def buckets(values: Values, most: int) -> Iterator[Bucket]:
    """Yield at most `most` ranges of equally many points that together are the whole curve."""
    points = np.flatnonzero(np.isfinite(values))
    for part in np.array_split(points, min(most, len(points))) if len(points) else []:
        found = values[part]
        yield Bucket(int(part[0]), int(part[-1]), float(found.mean()), float(found.min()), float(found.max()))

"""Means over seeds, with Student's 95 % intervals. Pure."""

from collections.abc import Sequence
from math import sqrt
from statistics import mean, stdev

from pydantic import BaseModel, ConfigDict, Field

_QUANTILES = (
    *(12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281),
    *(2.2010, 2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860),
    *(2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484, 2.0452, 2.0423),
)
"""0.975 quantiles of Student's distribution, by degrees of freedom from 1."""


class Interval(BaseModel):
    """A mean, and the ends of its 95 % interval; the ends are None with a single seed."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    mean: float = Field(allow_inf_nan=False)
    low: float | None = Field(None, allow_inf_nan=False)
    high: float | None = Field(None, allow_inf_nan=False)


def student(degrees: int) -> float:
    """Return the 0.975 quantile of Student's distribution; above 30 degrees of freedom the slightly larger one of
    30. Raises ValueError without any."""
    if degrees < 1:
        raise ValueError(f"an interval needs at least 1 degree of freedom, not {degrees}")
    return _QUANTILES[min(degrees, len(_QUANTILES)) - 1]


def interval(values: Sequence[float]) -> Interval:
    """Return the mean of one value per seed, with its interval."""
    middle = mean(values)
    if len(values) == 1:
        return Interval(mean=middle)
    half = student(len(values) - 1) * stdev(values) / sqrt(len(values))
    return Interval(mean=middle, low=middle - half, high=middle + half)

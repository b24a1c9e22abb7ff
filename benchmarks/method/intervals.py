"""Means with Student's 95 % intervals. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import mean, stdev

_QUANTILES = (
    *(12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281),
    *(2.2010, 2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860),
    *(2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484, 2.0452, 2.0423),
)
"""0.975 quantiles of Student's distribution, by degrees of freedom from 1."""


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds."""

    mean: float
    low: float | None
    """Lower end of the 95 % interval; None with one seed."""
    high: float | None
    seeds: int
    at_most: bool = False
    """True if a value is an upper bound: the curve that was read begins beyond it."""
    at_least: bool = False


def student(degrees: int) -> float:
    """Return the 0.975 quantile of Student's distribution; above 30 degrees of freedom the slightly larger one of
    30."""
    if degrees < 1:
        raise ValueError(f"an interval needs at least 1 degree of freedom, not {degrees}")
    return _QUANTILES[min(degrees, len(_QUANTILES)) - 1]


def estimate(values: Sequence[float], *, at_most: bool = False, at_least: bool = False) -> Estimate:
    """Return the mean of one value per seed, with its interval."""
    middle, seeds = mean(values), len(values)
    if seeds == 1:
        return Estimate(middle, None, None, seeds, at_most, at_least)
    half = student(seeds - 1) * stdev(values) / sqrt(seeds)
    return Estimate(middle, middle - half, middle + half, seeds, at_most, at_least)

"""Means with Student's 95 % intervals. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import mean, stdev

from pseudoreal_trainer.estimate.advice.intervals import student


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
    ends_above: bool = False
    """True for an arm that ends above the final loss of unshared training, as the mean over seeds: seeds that end above
    have their speed-up at their own final loss."""


def estimate(
    values: Sequence[float], *, at_most: bool = False, at_least: bool = False, ends_above: bool = False
) -> Estimate:
    """Return the mean of one value per seed, with its interval."""
    middle, seeds = mean(values), len(values)
    if seeds == 1:
        return Estimate(middle, None, None, seeds, at_most, at_least, ends_above)
    half = student(seeds - 1) * stdev(values) / sqrt(seeds)
    return Estimate(middle, middle - half, middle + half, seeds, at_most, at_least, ends_above)

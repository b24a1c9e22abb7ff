"""Trend of a difference with the size of the model: a weighted line over the logarithm of the parameters. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import log, sqrt
from statistics import mean

from pseudoreal_trainer.estimate.advice.intervals import student

from benchmarks.method.analysis import Trial
from benchmarks.method.intervals import Estimate


@dataclass(frozen=True)
class Sample:
    parameters: int
    differences: tuple[float, ...]
    """Paired differences, one for each seed."""

    @property
    def mean(self) -> float:
        return mean(self.differences)


@dataclass(frozen=True)
class Trend:
    samples: tuple[Sample, ...]
    slope: Estimate
    """Change of the difference for each doubling of the parameters, nats."""
    middle: float
    """Logarithm of the parameters at which the line has the height `height`."""
    height: float

    def at(self, parameters: float) -> float:
        return self.height + self.slope.mean * (log(parameters) - self.middle) / log(2)


def samples_of(trials: Sequence[Trial], arm: str) -> list[Sample]:
    """Return the paired differences of an arm by size, ascending. `trials`: those of one study."""
    found = [
        Sample(trial.parameters, tuple(own.final - unshared.final for own, unshared in trial.paired))
        for trial in trials
        if trial.arm.name == arm and trial.paired
    ]
    return sorted(found, key=lambda sample: sample.parameters)


def trend(samples: Sequence[Sample]) -> Trend | str:
    """Return the line through the differences, or a sentence that says why there is none.

    A size weighs as much as it has seeds. The interval is Student's, from the scatter of the seeds about the line, so
    it is wider if the sizes do not lie on a line.
    """
    points = [(log(sample.parameters), difference) for sample in samples for difference in sample.differences]
    degrees = len(points) - 2
    if len(samples) < 2:
        return "one size, no trend"
    if degrees < 1:
        return "one seed of each size, no interval"
    middle, height = mean(x for x, _ in points), mean(y for _, y in points)
    spread = sum((x - middle) ** 2 for x, _ in points)
    slope = sum((x - middle) * (y - height) for x, y in points) / spread
    left = sum((y - height - slope * (x - middle)) ** 2 for x, y in points)
    half = student(degrees) * sqrt(left / degrees / spread)
    doubled = [log(2) * value for value in (slope, slope - half, slope + half)]
    seeds = min(len(sample.differences) for sample in samples)
    return Trend(tuple(samples), Estimate(doubled[0], doubled[1], doubled[2], seeds), middle, height)

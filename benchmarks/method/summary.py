"""From results of training to the figures of the report: means over seeds, bumps, and crossings of curves. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, stdev

from benchmarks.method.lives import Life, PhaseLife, Point


@dataclass(frozen=True)
class Pace:
    """Median seconds of a step over all comparable results, because other programs disturb single results."""

    seconds: dict[tuple[str, str], float]
    """(experiment, phase) -> seconds of a step."""

    def at(self, life: Life, step: int) -> float:
        """Return the seconds of training until a step is done."""
        total = 0.0
        for phase in life.phases:
            done = min(max(step - phase.first_step + 1, 0), phase.steps)
            total += done * self.seconds[life.experiment, phase.name]
        return total


def points(life: Life) -> list[Point]:
    """Return the points of all phases; the point at the delink, which both phases have, occurs once."""
    found = {point.step: point for phase in life.phases for point in phase.points}
    return [found[step] for step in sorted(found)]


def final_loss(life: Life) -> float:
    return points(life)[-1].loss


def spread(values: Sequence[float]) -> tuple[float, float]:
    """Return mean and standard deviation over seeds."""
    return mean(values), stdev(values) if len(values) > 1 else 0.0


def first_at(life: Life, loss: float) -> int | None:
    """Return the first validated step with at most this loss; None if there is none."""
    return next((point.step for point in points(life) if point.loss <= loss), None)


@dataclass(frozen=True)
class Bump:
    height: float
    """Largest excess over the loss at the delink, in nats."""
    steps: int | None
    """Steps from the delink until the loss stays at or below its value at the delink; None if it never does."""


def bump(life: Life) -> Bump:
    real: PhaseLife = life.phases[-1]
    before, after = real.points[0], real.points[1:]
    above = [point for point in after if point.loss > before.loss]
    if not above:
        return Bump(0.0, 0)
    later = [point.step for point in after if point.step > above[-1].step]
    return Bump(max(point.loss for point in above) - before.loss, later[0] - before.step if later else None)

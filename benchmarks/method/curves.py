"""Loss against budget of an arm with one seed, read in the logarithm of the tokens. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import exp, log
from typing import Literal

from benchmarks.method.costs import Spending

Bound = Literal["at most", "at least"]


@dataclass(frozen=True)
class Reading:
    tokens: float
    was_reached_before: bool = False
    """True if the curve is below the loss from its first budget: `tokens` is then an upper bound."""


@dataclass(frozen=True)
class Curve:
    """Final losses of trainings with different budgets; the last one is the full budget."""

    tokens: tuple[int, ...]
    """Tokens of the budgets, ascending."""
    losses: tuple[float, ...]

    @property
    def full(self) -> int:
        return self.tokens[-1]

    @property
    def final(self) -> float:
        return self.losses[-1]

    def reaches(self, loss: float) -> Reading | None:
        """Return the tokens at which the curve first falls to this loss, interpolated in log tokens between budgets.

        If the loss of the smallest budget is lower, that budget, marked as an upper bound. None if the curve stays
        above.
        """
        if self.losses[0] <= loss:
            return Reading(self.tokens[0], self.losses[0] < loss)
        points = [*zip(self.tokens, self.losses, strict=True)]
        for (before, above), (after, below) in pairwise(points):
            if below <= loss:
                share = (above - loss) / (above - below)
                return Reading(exp(log(before) + share * (log(after) - log(before))))
        return None

    def loss_at(self, tokens: float) -> float | None:
        """Return the loss of a budget; None outside the budgets that were trained."""
        # A sum of prices may miss an end by its last bits.
        tokens = round(tokens, 3)
        if not self.tokens[0] <= tokens <= self.full:
            return None
        points = [*zip(self.tokens, self.losses, strict=True)]
        for (before, first), (after, second) in pairwise(points):
            if tokens <= after:
                share = (log(tokens) - log(before)) / (log(after) - log(before))
                return first + share * (second - first)
        return self.final


@dataclass(frozen=True)
class Meeting:
    """Where an arm and unshared training with the same seed have the same loss, as fractions of the full budget.

    The loss is the final loss of unshared training; if the arm does not reach it, the final loss of the arm, which
    unshared training reaches earlier.
    """

    arm: float
    unshared: float
    bound: Bound | None = None
    """Kind of bound that the ratio of the fractions is; None if both curves were read between their budgets."""

    def speed_up(self, spending: Spending) -> float:
        """Return how many times cheaper the arm reaches the loss. `spending`: the arm's."""
        return self.unshared / spending.until(self.arm)


def meeting(arm: Curve, unshared: Curve) -> Meeting:
    reached = arm.reaches(unshared.final)
    if reached is not None:
        return Meeting(reached.tokens / arm.full, 1, "at least" if reached.was_reached_before else None)
    earlier = unshared.reaches(arm.final)
    assert earlier is not None, "an arm that does not reach the final loss of unshared training ends above it"
    return Meeting(1, earlier.tokens / unshared.full, "at most" if earlier.was_reached_before else None)


def difference_at_equal_cost(arm: Curve, unshared: Curve, spending: Spending) -> float | None:
    """Return the arm's final loss minus the loss of unshared training that has cost as much; None if that is below the
    smallest budget of unshared training."""
    loss = unshared.loss_at(spending.until(1) * arm.full)
    return None if loss is None else arm.final - loss


def mean_curve(curves: Sequence[Curve]) -> Curve:
    """Return the mean over seeds at the budgets that all of them have."""
    common = sorted(set.intersection(*(set(curve.tokens) for curve in curves)))
    losses = [[curve.losses[curve.tokens.index(tokens)] for tokens in common] for curve in curves]
    return Curve(tuple(common), tuple(sum(column) / len(curves) for column in zip(*losses, strict=True)))

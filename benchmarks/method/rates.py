"""Choice of an arm's peak rate: the best of a grid at half the budget, which is extended until the best rate is not at
its edge; then the best of this rate and lower ones at the full budget. Pure."""

from collections.abc import Mapping, Sequence

from benchmarks.method.arms import FIRST_RATES

_FACTOR = 2


def next_rates(losses: Mapping[float, float], first: Sequence[float] = FIRST_RATES) -> list[float]:
    """Return the rates that are still to be tried, beginning with `first`. `losses`: rate -> validation loss so far; a
    diverged run has NaN."""
    missing = [rate for rate in first if rate not in losses]
    if missing:
        return missing
    best = best_rate(losses)
    if best == max(losses):
        return [best * _FACTOR]
    return [best / _FACTOR] if best == min(losses) else []


def next_lower_rates(losses: Mapping[float, float], best_of_half: float) -> list[float]:
    """Return the rates that are still to be tried at the full budget. `losses`: rate -> validation loss there so far.

    A longer training has a lower best rate, so rates above the best one of half the budget are not tried again.
    """
    missing = [rate for rate in (best_of_half, best_of_half / _FACTOR) if rate not in losses]
    if missing:
        return missing
    lowest = min(losses)
    return [lowest / _FACTOR] if best_rate(losses) == lowest else []


def best_rate(losses: Mapping[float, float]) -> float:
    """Return the rate with the lowest loss. Raises ValueError if no run has a finite loss."""
    finite = {rate: loss for rate, loss in losses.items() if loss == loss}
    if not finite:
        raise ValueError(f"no rate of {sorted(losses)} has a finite loss")
    return min(finite, key=lambda rate: finite[rate])

"""The source of each sample of a mixture: a periodic table, as long as the sum of the weights. Pure.

Sample n comes from the source in slot n mod period: in every period each source has exactly its weight, and no list of
samples is needed. The table is filled by earliest deadline first: the i-th sample (i = 0, 1, …) of a source with the
share w/P of the samples may use the slots floor(i P/w) .. ceil((i + 1) P/w) - 1; each slot takes, of the samples that
may use it, the one with the earliest last slot. Such a table always exists for unit tasks on one machine (Liu and
Layland 1973, "Scheduling algorithms for multiprogramming in a hard-real-time environment"; with these slots Baruah,
Cohen, Plaxton and Varvel 1996, "Proportionate progress"). With it, every source deviates from its share by less than
one sample in every prefix. Taking the source that is furthest behind does not ensure this: with the weights 12, 3, 1, 1
and 12 some source is more than one sample off.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from heapq import heapify, heappop, heappush
from math import gcd

import numpy as np
from numpy.typing import NDArray

MOST_PERIOD = 100_000
"""Largest sum of the weights after division by their common divisor: a period is a table in memory."""

Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class Mixture:
    weights: tuple[int, ...]
    """Samples of each source in a period."""
    slots: Numbers
    """Index of the source of each slot, [period]."""
    ranks: Numbers
    """Number of earlier slots with the same source, [period]."""

    def locate(self, samples: Numbers) -> tuple[Numbers, Numbers]:
        """Return the source of each sample, and the sample's number among the samples of its source; both
        [len(samples)]. `samples`: counted from the start of the mixture."""
        periods, slots = np.divmod(samples, len(self.slots))
        sources = self.slots[slots]
        return sources, periods * np.array(self.weights)[sources] + self.ranks[slots]

    def counts(self, samples: int) -> list[int]:
        """Return the number of samples of each source among the first `samples`."""
        periods, slots = divmod(samples, len(self.slots))
        begun = np.bincount(self.slots[:slots], minlength=len(self.weights)).tolist()
        return [periods * weight + more for weight, more in zip(self.weights, begun, strict=True)]


def mixture(weights: Sequence[int]) -> Mixture:
    """Return the mixture with these weights, at least one of them positive. Raises ValueError if its period is too
    long."""
    divisor = reduce(gcd, weights)
    assert divisor > 0, "a mixture has a source with a positive weight"
    reduced = tuple(weight // divisor for weight in weights)
    if sum(reduced) > MOST_PERIOD:
        raise ValueError(
            f"the weights of a mixture, divided by their greatest common divisor, add up to {sum(reduced):,}, but the"
            f" sum must be at most {MOST_PERIOD:,}; use smaller weights"
        )
    slots = np.fromiter(_slots(reduced), dtype=np.int64)
    ranks = np.empty_like(slots)
    for source, weight in enumerate(reduced):
        ranks[slots == source] = np.arange(weight)
    return Mixture(reduced, slots, ranks)


def _slots(weights: tuple[int, ...]) -> Iterator[int]:
    """Yield the source of each slot of a period."""
    period = sum(weights)
    taken = [0] * len(weights)
    waiting = [(0, source) for source, weight in enumerate(weights) if weight]
    ready: list[tuple[int, int]] = []
    heapify(waiting)
    for slot in range(period):
        while waiting and waiting[0][0] <= slot:
            source = heappop(waiting)[1]
            heappush(ready, (-(-(taken[source] + 1) * period // weights[source]), source))
        source = heappop(ready)[1]
        yield source
        taken[source] += 1
        heappush(waiting, (taken[source] * period // weights[source], source))

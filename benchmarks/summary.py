"""From runs to the numbers of the tables. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import quantiles

from benchmarks.cases import Case
from benchmarks.results import Run

DEVICE, HOST, DISK = "pseudoreal, device", "pseudoreal, host", "pseudoreal, disk"
WHOLE = "pseudoreal, device, not sharded"
MOST_SPREAD = 0.25
"""Largest `Timing.spread` of a cell that is compared."""
COUNTERPARTS: Mapping[str, str] = {
    "DistributedDataParallel": WHOLE,
    "fully_shard": DEVICE,
    "fully_shard, weights kept": DEVICE,
    "fully_shard + offload": HOST,
    "DeepSpeed ZeRO-3": DEVICE,
    "DeepSpeed ZeRO-3 + offload": HOST,
}
"""Peer -> our engine with its state in the same place."""


@dataclass(frozen=True)
class Timing:
    """Time of one stack in one case, over the timed steps of all rounds."""

    milliseconds: float
    """Median."""
    lower: float
    """First quartile in milliseconds."""
    upper: float
    """Third quartile in milliseconds."""

    @property
    def spread(self) -> float:
        """Distance of the quartiles, divided by the median."""
        return (self.upper - self.lower) / self.milliseconds

    @property
    def is_quiet(self) -> bool:
        """True if other load on the machine was negligible. A cell that is not quiet is not compared."""
        return self.spread <= MOST_SPREAD


@dataclass(frozen=True)
class Comparison:
    case: Case
    peer: str
    ratio: float
    """The peer's time divided by ours: above 1, ours is faster."""

    @property
    def is_won(self) -> bool:
        return self.ratio > 1


Timings = Mapping[tuple[str, Case], Timing]


def timings(runs: Sequence[Run]) -> Timings:
    seconds: dict[tuple[str, Case], list[float]] = {}
    for run in runs:
        seconds.setdefault((run.stack, run.case), []).extend(run.timed_seconds)
    return {key: timing(values) for key, values in seconds.items()}


def comparisons(found: Timings) -> list[Comparison]:
    """Return every peer compared with its counterpart, if both were measured on a quiet machine."""
    return [
        Comparison(case, peer, timing.milliseconds / own.milliseconds)
        for (peer, case), timing in found.items()
        if timing.is_quiet and (own := found.get((COUNTERPARTS.get(peer, ""), case))) and own.is_quiet
    ]


def timing(seconds: Sequence[float]) -> Timing:
    """Return the timing of one cell, from at least two numbers."""
    first, middle, third = quantiles(seconds, n=4)
    return Timing(1000 * middle, 1000 * first, 1000 * third)

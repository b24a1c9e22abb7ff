"""From runs to the numbers of the tables. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import quantiles

from tests.benchmarks.cases import Case
from tests.benchmarks.results import Run

DEVICE, HOST, DISK = "pseudoreal, device", "pseudoreal, host", "pseudoreal, disk"
COUNTERPARTS: Mapping[str, str] = {
    "fully_shard": DEVICE,
    "fully_shard + offload": HOST,
    "DeepSpeed ZeRO-3": DEVICE,
    "DeepSpeed ZeRO-3 + offload": HOST,
}
"""For each peer our engine with its state in the same place."""


@dataclass(frozen=True)
class Timing:
    """Of one stack in one case, over the timed steps of all rounds."""

    milliseconds: float
    """The median."""
    spread: float
    """Distance of the quartiles, as a share of the median."""


@dataclass(frozen=True)
class Comparison:
    case: Case
    peer: str
    ratio: float
    """The peer's time over ours: above 1, ours is faster."""

    @property
    def is_won(self) -> bool:
        return self.ratio > 1


Timings = Mapping[tuple[str, Case], Timing]


def timings(runs: Sequence[Run]) -> Timings:
    seconds: dict[tuple[str, Case], list[float]] = {}
    for run in runs:
        seconds.setdefault((run.stack, run.case), []).extend(run.timed_seconds)
    return {key: _timing(values) for key, values in seconds.items()}


def comparisons(found: Timings) -> list[Comparison]:
    """Every peer with its counterpart, wherever both were measured."""
    return [
        Comparison(case, peer, timing.milliseconds / found[COUNTERPARTS[peer], case].milliseconds)
        for (peer, case), timing in found.items()
        if peer in COUNTERPARTS and (COUNTERPARTS[peer], case) in found
    ]


def _timing(seconds: Sequence[float]) -> Timing:
    first, middle, third = quantiles(seconds, n=4)
    return Timing(1000 * middle, (third - first) / middle)

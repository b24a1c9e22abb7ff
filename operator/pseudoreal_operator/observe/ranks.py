"""Ranks of each pod: from the pods' reports, and as ranges in the status. Pure."""

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, islice

from pseudoreal_api.status.status import Placement
from pseudoreal_api.wire.reports import PodReport

from pseudoreal_operator.observe.stages import Execution

MOST_NUMBERS = 1_000_000
"""Maximum count of numbers that `numbers_of` reads from one text: more than the ranks of any job."""
_RANGE = re.compile("([0-9]{1,6})(?:-([0-9]{1,6}))?")


def first_ranks(workers: int, ranks_per_worker: int, said: Mapping[int, int]) -> dict[int, int]:
    """Return worker number -> first rank. `said`: worker number -> first rank, for some of the workers; impossible
    ranks are ignored. The other workers get the remaining ranks in the order of their numbers."""
    if not said:
        return dict(enumerate(range(0, workers * ranks_per_worker, ranks_per_worker)))
    left = dict.fromkeys(range(0, workers * ranks_per_worker, ranks_per_worker))
    found: dict[int, int] = {}
    for worker, rank in sorted(said.items()):
        if worker in range(workers) and rank in left:
            found[worker] = rank
            del left[rank]
    unknown = [worker for worker in range(workers) if worker not in found]
    return found | dict(zip(unknown, left, strict=True))


def reported_first_rank(report: PodReport, ranks_per_worker: int) -> int | None:
    """Return the first rank of the reporting pod; None before one of its ranks has started."""
    ranks = [sign.rank for sign in report.ranks]
    return min(ranks) // ranks_per_worker * ranks_per_worker if ranks else None


def recorded_first_ranks(placement: Placement | None, execution: Execution) -> dict[int, int]:
    """Return worker number -> first rank as the placement records it; empty if the placement is of another
    execution."""
    if placement is None or (placement.phase_name, placement.execution) != (execution.phase, execution.number):
        return {}
    found: dict[int, int] = {}
    for node in placement.nodes:
        ranks, workers = [*numbers_of(node.ranks)], [*numbers_of(node.workers)]
        if workers and len(ranks) % len(workers) == 0:
            found |= dict(zip(workers, ranks[:: len(ranks) // len(workers)], strict=True))
    return found


def ranges_text(numbers: Iterable[int]) -> str:
    """Return the numbers in their order, as ranges such as 0-3,8,6."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ",".join("-".join(map(str, run)) for run in runs)


def numbers_of(text: str) -> Iterator[int]:
    """Yield the numbers of a text of ranges, at most MOST_NUMBERS. Malformed parts are ignored, because other clients
    may have written the status."""
    matches = filter(None, map(_RANGE.fullmatch, text.split(",")))
    numbers = (range(int(match[1]), int(match[2] or match[1]) + 1) for match in matches)
    yield from islice(chain.from_iterable(numbers), MOST_NUMBERS)

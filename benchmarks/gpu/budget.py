"""Run cases in order within a time budget: the time for each, and the cases left out. Pure except for a given clock."""

from collections.abc import Callable, Iterator, Sequence

from benchmarks.gpu.cases import Case
from benchmarks.gpu.results import Record

LEAST_SECONDS = 20.0
"""A case does not start with less time: torch and the weights alone take this long."""
MOST_SECONDS = 170.0
"""Time limit of a case, so that a hanging case leaves time for the following ones."""
STOP_SECONDS = 5.0
"""Seconds reserved for stopping a case and writing the result."""

Clock = Callable[[], float]
Runner = Callable[[Case, float], Record]
"""Runs a case in a process of its own, with a limit in seconds."""


def within(
    seconds: float, cases: Sequence[Case], run: Runner, clock: Clock, least: float = LEAST_SECONDS
) -> Iterator[Record]:
    """Yield a record of each case in order: measured, or left out for lack of time."""
    end = clock() + seconds - STOP_SECONDS
    for case in cases:
        begin = clock()
        if (left := end - begin) < least:
            problem = f"{max(0.0, left):.0f} s were left, too few to begin"
            yield Record(case=case, left_out=case.points, problem=problem)
            continue
        record = run(case, min(MOST_SECONDS, left))
        yield record.model_copy(update={"seconds": clock() - begin})


def fits(left: float, last_step: float, growth: float, steps: int) -> bool:
    """Return whether a point of `steps` steps would end in time, if a step takes `growth` times as long as at the last
    point."""
    return last_step * growth * steps <= left

"""Cases in their order within a time: what is left for each, and what is left out. Pure but for a given clock."""

from collections.abc import Callable, Iterator, Sequence

from tests.benchmarks.gpu.cases import Case
from tests.benchmarks.gpu.results import Record

LEAST_SECONDS = 20.0
"""A case is not begun with less: torch and the weights alone take that long."""
MOST_SECONDS = 170.0
"""Time limit of a case: one that hangs must not take the time of all that follow."""
STOP_SECONDS = 5.0
"""At the end, to stop a case and to write."""

Clock = Callable[[], float]
Runner = Callable[[Case, float], Record]
"""Runs a case in a process of its own, for so many seconds at most."""


def within(
    seconds: float, cases: Sequence[Case], run: Runner, clock: Clock, least: float = LEAST_SECONDS
) -> Iterator[Record]:
    """A record of each case in its order: measured, or left out for want of time."""
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
    """Whether a point of `steps` steps ends in time, each taking `growth` times one of the point before."""
    return last_step * growth * steps <= left

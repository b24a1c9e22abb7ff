"""Ranks that hold up the others, found from the last report of each rank. Pure."""

from collections.abc import Callable, Sequence
from statistics import median

from pseudoreal_api.wire.reports import RankReport

_HALTED = ("T", "t", "Z", "X")
"""States of a process that does nothing: stopped, stopped by a debugger, zombie, dead."""


def suspected_ranks(signs: Sequence[RankReport]) -> list[int]:
    """Return the ranks that the others wait for, the best explanation first; empty if no rank can be singled out.

    In this order: ranks whose processes are stopped or dead; ranks that do not wait while others do, the one in its
    state for longest first; ranks with the lowest step; ranks that have left the fewest waits for others. The last
    criterion counts only when all ranks wait in the same step, and says little about pipelines: ranks of different
    stages wait differently often by design.
    """
    running = [sign for sign in signs if sign.activity != "ended"]
    halted = [sign for sign in running if sign.process in _HALTED]
    if halted:
        return _longest_first(halted)
    working = [sign for sign in running if sign.activity != "waiting"]
    if working and len(working) < len(running):
        return _longest_first(working)
    behind = _lowest(running, lambda sign: sign.step)
    if behind or working:
        return behind
    return _lowest(running, lambda sign: sign.collectives)


def stragglers(signs: Sequence[RankReport], factor: float) -> list[tuple[int, float]]:
    """Return the ranks that compute at least `factor` times as long per step as the median rank (of two ranks: as
    the faster one), each with its multiple; the slowest first."""
    busy = {sign.rank: sign.busy_seconds for sign in signs if sign.busy_seconds}
    if len(busy) < 2:
        return []
    usual = min(busy.values()) if len(busy) == 2 else median(busy.values())
    found = [(rank, seconds / usual) for rank, seconds in busy.items() if seconds >= factor * usual]
    return sorted(found, key=lambda entry: -entry[1])


def _longest_first(signs: Sequence[RankReport]) -> list[int]:
    return [sign.rank for sign in sorted(signs, key=lambda sign: -sign.seconds)]


def _lowest(signs: Sequence[RankReport], value: Callable[[RankReport], int]) -> list[int]:
    """Return the ranks with the lowest value; empty if all have the same."""
    values = [value(sign) for sign in signs]
    lowest = min(values, default=0)
    return (
        [] if all(v == lowest for v in values) else [s.rank for s, v in zip(signs, values, strict=True) if v == lowest]
    )

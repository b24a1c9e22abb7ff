"""Which rank holds up the others, from what all of them last said. Pure."""

from collections.abc import Callable, Sequence
from statistics import median

from pseudoreal_api.wire.reports import RankReport

_HALTED = ("T", "t", "Z", "X")
"""States of a process that does nothing: stopped, stopped by a debugger, dead, dead and gone."""


def suspects(signs: Sequence[RankReport]) -> list[int]:
    """Ranks that the others wait for, the best explanation first; empty when nobody can be singled out.

    In this order: processes that are stopped or dead; those that do not wait while others do, the longest at it first;
    those with the lowest step; those that have left the fewest waits. The last counts only when all of them wait in the
    same step, and says little of pipelines: ranks of different stages wait differently often by design.
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
    """Ranks that compute at least `factor` times as long for a step as the median rank (of two: as the other one), with
    how many times; the slowest first."""
    busy = {sign.rank: sign.busy_seconds for sign in signs if sign.busy_seconds}
    if len(busy) < 2:
        return []
    usual = min(busy.values()) if len(busy) == 2 else median(busy.values())
    found = [(rank, seconds / usual) for rank, seconds in busy.items() if seconds >= factor * usual]
    return sorted(found, key=lambda entry: -entry[1])


def _longest_first(signs: Sequence[RankReport]) -> list[int]:
    return [sign.rank for sign in sorted(signs, key=lambda sign: -sign.seconds)]


def _lowest(signs: Sequence[RankReport], value: Callable[[RankReport], int]) -> list[int]:
    """Ranks with the lowest value; empty when all have the same."""
    values = [value(sign) for sign in signs]
    lowest = min(values, default=0)
    return (
        [] if all(v == lowest for v in values) else [s.rank for s, v in zip(signs, values, strict=True) if v == lowest]
    )

"""Which working copies exist when: the windows of a rank, one for blocks and one for experts. Pure.

At every change of unit a window holds the units that are needed next, so it fetches as early as it can, and as
seldom: with L units in layered order and a window of k, 2L - k times a step, whatever the number of micro-batches.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise

from pseudoreal_trainer.plan.layout import POOLS, Layout, Pool
from pseudoreal_trainer.plan.records import Drop, Fetch, Read, Record
from pseudoreal_trainer.plan.spread import Part, units_used

Runs = list[tuple[int, int]]
"""Stretches of passes that use one unit after the other: (index of the first pass, unit)."""


def window_records(layout: Layout, order: Sequence[Part]) -> dict[int, list[Record]]:
    """Index into `order` -> what happens to working copies before that pass; index len(order): at the end."""
    before: dict[int, list[Record]] = {}
    for pool in POOLS:
        _insert_moves(layout, _runs(layout, pool, order, layout.moves), len(order), before)
    for pool in POOLS:
        _insert_refreshes(_runs(layout, pool, order, lambda unit: _is_refreshed_alone(layout, unit)), before)
    before[0] = [*_common(layout, order), *before.get(0, [])]
    return before


def _is_refreshed_alone(layout: Layout, unit: int) -> bool:
    return layout.refreshed(unit) and not layout.is_common(unit)


def _common(layout: Layout, order: Sequence[Part]) -> Iterator[Record]:
    """Gathers what other pipeline ranks use as well: before anything that waits for another rank."""
    used = {unit for record in order for unit in units_used(layout, record)}
    for unit in filter(layout.is_common, sorted(used)):
        if layout.home(unit) == "Disk":
            yield Read(unit)
        yield Fetch(unit)


def _insert_moves(layout: Layout, runs: Runs, end: int, before: dict[int, list[Record]]) -> None:
    window = _Window(layout)
    for start, (index, _) in enumerate(runs):
        before.setdefault(index, []).extend(window.turn_to(_next_distinct(runs, start, layout.window + 1)))
    before.setdefault(end, []).extend(window.turn_to([]))


@dataclass
class _Window:
    layout: Layout
    resident: dict[int, None] = field(default_factory=dict)
    read: set[int] = field(default_factory=set)

    def turn_to(self, coming: list[int]) -> Iterator[Record]:
        """Makes the window hold the units needed next. `coming`: one more of them than fit; that one is read ahead if
        it is on disk."""
        wanted = coming[: self.layout.window]
        for unit in [unit for unit in self.resident if unit not in wanted]:
            del self.resident[unit]
            yield Drop(unit)
        for unit in wanted:
            if unit not in self.resident:
                yield from self._read(unit)
                self.read.discard(unit)
                self.resident[unit] = None
                yield Fetch(unit)
        for unit in coming[self.layout.window :]:
            yield from self._read(unit)

    def _read(self, unit: int) -> Iterator[Record]:
        if self.layout.home(unit) == "Disk" and unit not in self.read:
            self.read.add(unit)
            yield Read(unit)


def _insert_refreshes(runs: Runs, before: dict[int, list[Record]]) -> None:
    """Gathers each unit one unit ahead of its first use."""
    first_use: dict[int, int] = {}
    for index, unit in runs:
        first_use.setdefault(unit, index)
    starts = list(first_use.items())
    if starts:
        before.setdefault(starts[0][1], []).insert(0, Fetch(starts[0][0]))
    for (_, index), (unit, _) in pairwise(starts):
        before.setdefault(index, []).append(Fetch(unit))


def _runs(layout: Layout, pool: Pool, order: Sequence[Part], counts: Callable[[int], bool]) -> Runs:
    """The stretches in which passes use counted units of a pool."""
    found: Runs = []
    for index, record in enumerate(order):
        for unit in units_used(layout, record):
            if layout.pool_of(unit) == pool and counts(unit) and (not found or found[-1][1] != unit):
                found.append((index, unit))
    return found


def _next_distinct(runs: Runs, start: int, count: int) -> list[int]:
    found: dict[int, None] = {}
    for _, unit in islice(runs, start, None):
        found[unit] = None
        if len(found) == count:
            break
    return list(found)

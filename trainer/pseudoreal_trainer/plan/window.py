"""Lifetimes of working copies: the windows of a rank, one for blocks and one for experts. Pure.

At every change of unit a window holds the units that are needed next. So fetches are as early and as few as possible:
with L units in layered order and a window of k, 2L - k per step, whatever the number of micro-batches.

A group of experts is fetched for the tokens of one position, at the earliest when these tokens are counted. The group
is dropped before it serves another position, because the tokens of that position decide again whether to fetch it. The
group is dropped as soon as it is no longer needed, because the tokens for the next unit may come much later.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise

from pseudoreal_trainer.plan.expert_parallel import PassPart, units_read
from pseudoreal_trainer.plan.layout import POOLS, Layout, Pool
from pseudoreal_trainer.plan.records import Count, Drop, Fetch, Read, Record


@dataclass
class _Run:
    """A run of passes that use one unit."""

    fetch: Fetch
    """Record that fetches the unit."""
    first: int
    """Index into `order` of the first pass of the run."""
    known: int
    """Index into `order` of the earliest pass before which the fetch may start."""
    last: int


def window_records(layout: Layout, order: Sequence[PassPart]) -> dict[int, list[Record]]:
    """Return index into `order` -> changes of working copies before that pass; index len(order): at the end."""
    before: dict[int, list[Record]] = {}
    for pool in POOLS:
        _insert_moves(layout, _runs(layout, pool, order, layout.moves), len(order), before)
    for pool in POOLS:
        _insert_refreshes(_runs(layout, pool, order, lambda unit: _is_refreshed_alone(layout, unit)), before)
    before[0] = [*_common(layout, order), *before.get(0, [])]
    return before


def _is_refreshed_alone(layout: Layout, unit: int) -> bool:
    return layout.refreshed(unit) and not layout.is_common(unit)


def _common(layout: Layout, order: Sequence[PassPart]) -> Iterator[Record]:
    """Yield the gathers of cross-stage units, which come before any record that waits for another rank."""
    used = {unit for record in order for unit in units_read(layout, record)}
    for unit in filter(layout.is_common, sorted(used)):
        if layout.home(unit) == "Disk":
            yield Read(unit)
        yield Fetch(unit)


def _insert_moves(layout: Layout, runs: list[_Run], end: int, before: dict[int, list[Record]]) -> None:
    window, start = _Window(layout), 0
    turns = {run.first for run in runs}
    turns |= {index for run in runs if run.fetch.wanted_by is not None for index in (run.known, run.last + 1)}
    for index in sorted(turns | {end}):
        while start < len(runs) and runs[start].last < index:
            start += 1
        before.setdefault(index, []).extend(window.turn_to(_next_distinct(runs, start, layout.window + 1), index))


@dataclass
class _Window:
    """Working copies and read-ahead weights of one pool, while the plan is made."""

    layout: Layout
    resident: dict[Fetch, None] = field(default_factory=dict)
    read: set[Fetch] = field(default_factory=set)

    def turn_to(self, coming: list[_Run], index: int) -> Iterator[Record]:
        """Yield records after which the window holds the units needed next from the pass `index` on. `coming`: one more
        run than the window has slots; its unit is read ahead if it is on disk."""
        wanted = [run.fetch for run in coming[: self.layout.window]]
        for fetch in [fetch for fetch in self.resident if fetch not in wanted]:
            del self.resident[fetch]
            yield Drop(fetch.unit)
        for number, run in enumerate(coming):
            if run.known > index:
                return
            if run.fetch in self.resident:
                continue
            yield from self._read(run.fetch)
            if number < self.layout.window:
                self.read.discard(run.fetch)
                self.resident[run.fetch] = None
                yield run.fetch

    def _read(self, fetch: Fetch) -> Iterator[Record]:
        if self.layout.home(fetch.unit) == "Disk" and fetch not in self.read:
            self.read.add(fetch)
            yield Read(fetch.unit, fetch.wanted_by)


def _insert_refreshes(runs: list[_Run], before: dict[int, list[Record]]) -> None:
    """Insert the gather of each resident unit one unit ahead of its first use."""
    first_use: dict[int, int] = {}
    for run in runs:
        first_use.setdefault(run.fetch.unit, run.first)
    starts = list(first_use.items())
    if starts:
        before.setdefault(starts[0][1], []).insert(0, Fetch(starts[0][0]))
    for (_, index), (unit, _) in pairwise(starts):
        before.setdefault(index, []).append(Fetch(unit))


def _runs(layout: Layout, pool: Pool, order: Sequence[PassPart], counts: Callable[[int], bool]) -> list[_Run]:
    """Return the runs of passes that use a unit of the pool, for units with `counts(unit)`."""
    found: list[_Run] = []
    counted: dict[int, int] = {}
    for index, record in enumerate(order):
        if isinstance(record, Count):
            counted[record.position] = index + 1
        for unit in units_read(layout, record):
            if layout.pool_of(unit) != pool or not counts(unit):
                continue
            is_optional = layout.is_optional(unit)
            fetch = Fetch(unit, record.position if is_optional else None)
            if not found or found[-1].fetch != fetch:
                found.append(_Run(fetch, index, counted[record.position] if is_optional else 0, index))
            found[-1].last = index
    return found


def _next_distinct(runs: list[_Run], start: int, count: int) -> list[_Run]:
    """Return the first runs of the next needed units, at most `count`. The list ends before a unit would appear again,
    for the tokens of a second position."""
    found: dict[Fetch, _Run] = {}
    for run in islice(runs, start, None):
        if run.fetch not in found and any(run.fetch.unit == fetch.unit for fetch in found):
            break
        found.setdefault(run.fetch, run)
        if len(found) == count:
            break
    return list(found.values())

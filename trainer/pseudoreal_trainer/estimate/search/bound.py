"""Lower bound on the seconds of a step, from sums alone, without a plan. Pure.

Layers of one kind cost the same, so each kind is computed once.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from pseudoreal_trainer.estimate.time.costs import Costs
from pseudoreal_trainer.plan.effects import Resource
from pseudoreal_trainer.plan.expert_parallel import split_passes
from pseudoreal_trainer.plan.layout import POOLS, Layout, Pool
from pseudoreal_trainer.plan.records import (
    Agree,
    Backward,
    Count,
    Exchange,
    Fetch,
    Flow,
    Forward,
    Leg,
    Pass,
    Recompute,
    Reduce,
    Send,
    Update,
)
from pseudoreal_trainer.plan.sizes import Sizes

_UnitRecord = type[Fetch] | type[Reduce] | type[Update]

_ROUNDING = 1e-9
"""Relative slack: a simulation adds the same numbers in another order and may round below their sum."""


def min_step_seconds(layout: Layout, sizes: Sizes, costs: Costs) -> float:
    """Return a lower bound on the mean seconds of a step over many steps: the load of the busiest resource of a rank.
    With global clipping, it is at least the latency of a micro-batch through all layers."""
    return max(_bounds(_LowerBounds(layout, sizes, costs))) * (1 - _ROUNDING)


def min_pass_seconds(layout: Layout, sizes: Sizes, costs: Costs) -> float:
    """Return the seconds of the passes of a step on the rank that computes the longest: a lower bound, at most
    `min_step_seconds`, that depends neither on replicas, sharding and homes of units, nor on the order of passes."""
    least = _LowerBounds(layout, sizes, costs)
    return max(map(least.compute, range(layout.pipeline))) * (1 - _ROUNDING)


def _bounds(least: "_LowerBounds") -> Iterator[float]:
    layout, costs = least.layout, least.costs
    ranks = range(layout.pipeline)
    computes, mains, waits = ([*map(part, ranks)] for part in (least.compute, least.main, least.waits))
    lanes = [*map(least.collectives, ranks), *map(least.exchanges, ranks), *least.messages]
    lanes += [seconds for rank in ranks for seconds in least.sides(rank)]
    yield from lanes
    yield from mains
    # Copies are not added: if copies do not overlap passes, they may run while the main thread waits.
    yield from (compute + wait for compute, wait in zip(computes, waits, strict=True))
    yield from map(least.copies, ranks)
    if costs.cores is not None:
        # Waits are not added: while the main thread waits, other resources use the cores.
        yield (sum(mains) + sum(lanes)) / costs.cores
    if layout.clipping == "Global":
        yield least.turn + max(map(sum, zip(least.ways, computes, waits, strict=True)))


@dataclass(frozen=True)
class _Passes:
    """Seconds of a micro-batch at a position, forward and backward."""

    compute: float
    exchange: float
    """Seconds of the exchanges with experts."""
    wait: float
    """Seconds of exchanges that overlap nothing; part of `exchange`."""
    way: float
    """Least latency in seconds from the input to the gradient of the input: `compute` plus `wait`, without the
    `Recompute` record, which can run before the gradient arrives."""


@dataclass(frozen=True)
class _LowerBounds:
    """Lower bounds on the seconds of a step on each resource of a layout's ranks."""

    layout: Layout
    sizes: Sizes
    costs: Costs

    def compute(self, rank: int) -> float:
        """Return the seconds of all passes of all micro-batches at the rank's positions."""
        return self._of_micro_batches(rank, lambda passes: passes.compute)

    def main(self, rank: int) -> float:
        """Return the seconds of the main thread: passes, and copies if they do not overlap."""
        return self.compute(rank) + (0.0 if self.costs.overlaps else self.copies(rank))

    def waits(self, rank: int) -> float:
        """Return the seconds in which the main thread waits with nothing else to do."""
        spread = [position for position in self.layout.positions(rank) if self.layout.spreads(position)]
        counts = sum(self.costs.seconds(Count(position, 0, 1), Resource.EXPERTS) for position in spread)
        # With groups, the gradients of the next micro-batch travel during a backward pass: the main thread waits for
        # the first exchange only.
        times = 1 if self.layout.expert_groups > 1 else self.layout.micro_batches
        return times * sum(self._passes[position].wait for position in self.layout.positions(rank)) + counts

    def exchanges(self, rank: int) -> float:
        return self._of_micro_batches(rank, lambda passes: passes.exchange)

    def collectives(self, rank: int) -> float:
        """Return the seconds of the collectives: each gradient is reduced, and sharded units are gathered."""
        refreshed = filter(self.layout.refreshed, self.layout.local_units(rank))
        return (
            self._sum(Reduce, Resource.COLLECTIVE, self.layout.local_units(rank))
            + self._sum(Fetch, Resource.COLLECTIVE, refreshed)
            + self._fetched(rank, Resource.COLLECTIVE)
        )

    def copies(self, rank: int) -> float:
        return self._fetched(rank, Resource.COPY_IN)

    def sides(self, rank: int) -> list[float]:
        """Return lower bounds on the seconds of a step: the work of the reduction thread, and the work of the update
        thread. Under global clipping without speculation, the two threads take turns, so their work is added. Only one
        update can overlap the reductions of the next step, and the longest is left out for it."""
        units = self.layout.local_units(rank)
        reductions, updates = self._sum(Reduce, Resource.REDUCTION, units), self._sum(Update, Resource.UPDATE, units)
        if self.layout.has_speculation or not self.layout.keeps_gradients:
            return [reductions, updates]
        longest = max(self._of_unit(Update, Resource.UPDATE, unit) for unit in units)
        return [reductions + updates - longest]

    @cached_property
    def messages(self) -> list[float]:
        """Seconds of the messages on each channel from one pipeline rank to another."""
        return [self.layout.micro_batches * self._message * count for count in Counter(_channels(self.layout)).values()]

    @property
    def turn(self) -> float:
        """Seconds between the last pass of a step and the first pass of the next, with global clipping: the gradient of
        the first unit is reduced last, all ranks agree, then the unit is updated and fetched."""
        layout, (unit,) = self.layout, self.layout.units_of(0)
        seconds = self.costs.seconds
        # A speculative update may have ended before the ranks agree.
        start = 0.0 if layout.is_speculative(unit) else seconds(Update(unit), Resource.UPDATE)
        if layout.moves(unit) or layout.refreshed(unit):
            start += seconds(Fetch(unit), Resource.COPY_IN) + seconds(Fetch(unit), Resource.COLLECTIVE)
        reduced = seconds(Reduce(unit), Resource.COLLECTIVE) + seconds(Reduce(unit), Resource.REDUCTION)
        return reduced + seconds(Agree(), Resource.REDUCTION) + start

    @property
    def ways(self) -> list[float]:
        """Entry i: latency in seconds of a micro-batch from the embedding to the first position of pipeline rank i, and
        of the gradient back to the embedding."""
        layout = self.layout
        legs = [
            passes.way + (2 * self._message if layout.rank_of(here) != layout.rank_of(here + 1) else 0)
            for here, passes in enumerate(self._passes[:-1])
        ]
        to_position = [*accumulate(legs, initial=0.0)]
        return [to_position[min(layout.positions(rank))] for rank in range(layout.pipeline)]

    def _fetched(self, rank: int, resource: Resource) -> float:
        """Return the seconds of fetches. Streamed units are fetched for the forward and for the backward pass, except
        units that stay in the window in between. The head is fetched once: its forward and backward are one pass."""
        return sum(self._fetched_in(rank, pool, resource) for pool in POOLS)

    def _fetched_in(self, rank: int, pool: Pool, resource: Resource) -> float:
        layout = self.layout
        once = [self._of_unit(Fetch, resource, unit) for unit in layout.moving_units(rank, pool)]
        of_head = layout.units_of(layout.head)
        twice = [
            self._of_unit(Fetch, resource, unit) for unit in layout.moving_units(rank, pool) if unit not in of_head
        ]
        return sum(once) + sum(sorted(twice)[: max(0, len(twice) - layout.window)])

    @cached_property
    def _message(self) -> float:
        return (
            self.costs.seconds(Send(Flow.ACTIVATION, 1, 0, 0), Resource.MESSAGES) if self.layout.pipeline > 1 else 0.0
        )

    def _of_micro_batches(self, rank: int, part: Callable[[_Passes], float]) -> float:
        return self.layout.micro_batches * sum(part(self._passes[position]) for position in self.layout.positions(rank))

    @cached_property
    def _passes(self) -> list[_Passes]:
        """Seconds of a micro-batch at each position."""
        known: dict[Hashable, _Passes] = {}
        found = []
        for position in range(self.layout.head + 1):
            kind = self._kind(position)
            if kind not in known:
                known[kind] = self._first_passes(position)
            found.append(known[kind])
        return found

    def _first_passes(self, position: int) -> _Passes:
        # The head's backward pass includes its forward pass.
        passes = [Forward(position, 0)] if position != self.layout.head else []
        parts = split_passes(self.layout, [*passes, Backward(position, 0)])
        compute = sum(self.costs.seconds(part, Resource.COMPUTE) for part in parts if isinstance(part, Pass))
        early = sum(self.costs.seconds(part, Resource.COMPUTE) for part in parts if isinstance(part, Recompute))
        exchanges = {one: self.costs.seconds(one, Resource.EXPERTS) for one in parts if isinstance(one, Exchange)}
        # The main thread waits for the gradients of tokens; see `plan/expert_parallel.py`.
        wait = sum(seconds for one, seconds in exchanges.items() if one.leg is Leg.DISPATCH_GRADIENT)
        return _Passes(compute, sum(exchanges.values()), wait, compute - early + wait)

    def _kind(self, position: int) -> Hashable:
        kind = self.sizes.kind(position - 1) if 0 < position < self.layout.head else position
        return kind, tuple(self.sizes.units[unit].numel for unit in self.layout.units_of(position))

    def _sum(self, kind: _UnitRecord, resource: Resource, units: Iterable[int]) -> float:
        return sum(self._of_unit(kind, resource, unit) for unit in units)

    def _of_unit(self, kind: _UnitRecord, resource: Resource, unit: int) -> float:
        """Return the seconds of a unit's record; computed once for units of the same size, home and users."""
        layout = self.layout
        users, numel = layout.users[unit], self.sizes.units[unit].numel
        of_unit = (layout.home(unit), layout.pool_of(unit), layout.fold_of(unit))
        # The distance between the users matters: pipeline ranks that are further apart may be on different machines.
        key = (kind, resource, numel, *of_unit, len(users), users[-1] - users[0])
        if key not in self._of_units:
            self._of_units[key] = self.costs.seconds(kind(unit), resource)
        return self._of_units[key]

    @cached_property
    def _of_units(self) -> dict[Hashable, float]:
        return {}


def _channels(layout: Layout) -> Iterator[tuple[int, int]]:
    """Yield (source, target) pipeline ranks of each message of a micro-batch, activations and gradients."""
    for position in range(layout.head):
        here, there = layout.rank_of(position), layout.rank_of(position + 1)
        if here != there:
            yield from ((here, there), (there, here))

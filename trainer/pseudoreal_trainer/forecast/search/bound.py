"""Seconds that a step of a layout takes at least, from sums alone: no plan is made. Pure.

Layers that are alike cost the same, so each kind is looked at once.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from pseudoreal_trainer.forecast.memory.sizes import Sizes
from pseudoreal_trainer.forecast.time.costs import Costs
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
from pseudoreal_trainer.plan.spread import with_parts

_ROUNDING = 1e-9
"""Share by which a simulation, which adds in another order, may be below the same sum."""


def least_seconds(layout: Layout, sizes: Sizes, costs: Costs) -> float:
    """A bound from below of a step's seconds, in the mean of many steps: what the busiest part of a rank does in a
    step, and where steps have a common end the way of a micro-batch through all layers besides."""
    return max(_bounds(_Least(layout, sizes, costs))) * (1 - _ROUNDING)


def _bounds(least: "_Least") -> Iterator[float]:
    layout, costs = least.layout, least.costs
    ranks = range(layout.pipeline)
    computes, mains, waits = ([*map(part, ranks)] for part in (least.compute, least.main, least.waits))
    lanes = [*map(least.collectives, ranks), *map(least.exchanges, ranks), *map(least.side, ranks), *least.messages]
    yield from lanes
    yield from mains
    # Where copies do not run beside passes, they run while the first thread waits.
    yield from (compute + wait for compute, wait in zip(computes, waits, strict=True))
    yield from map(least.copies, ranks)
    if costs.cores is not None:
        # What the first thread waits for is another lane's work.
        yield (sum(mains) + sum(lanes)) / costs.cores
    if layout.clipping == "Global":
        yield least.turn + max(map(sum, zip(least.ways, computes, waits, strict=True)))


@dataclass(frozen=True)
class _Passes:
    """What a micro-batch costs at a position, both ways, in seconds."""

    compute: float
    exchange: float
    """Exchanges with experts."""
    wait: float
    """The part of them that nothing runs beside."""
    way: float
    """What it takes from the input to the gradient of the input, where what is between them is known at once: all but
    what can be computed again before the gradient comes."""


@dataclass(frozen=True)
class _Least:
    """The least seconds of what the ranks of a layout do in a step."""

    layout: Layout
    sizes: Sizes
    costs: Costs

    def compute(self, rank: int) -> float:
        """All micro-batches pass through all positions of the rank."""
        return self._of_micro_batches(rank, lambda passes: passes.compute)

    def main(self, rank: int) -> float:
        """The first thread: it passes them, and copies where nothing else does."""
        return self.compute(rank) + (0.0 if self.costs.overlaps else self.copies(rank))

    def waits(self, rank: int) -> float:
        """What the first thread waits for with nothing else to do."""
        spread = [position for position in self.layout.positions(rank) if self.layout.spreads(position)]
        counts = sum(self.costs.network(Count(position, 0, 1)) for position in spread)
        # In groups, the next micro-batch's gradients travel while one goes back: only the first are waited for.
        times = 1 if self.layout.expert_groups > 1 else self.layout.micro_batches
        return times * sum(self._passes[position].wait for position in self.layout.positions(rank)) + counts

    def exchanges(self, rank: int) -> float:
        return self._of_micro_batches(rank, lambda passes: passes.exchange)

    def collectives(self, rank: int) -> float:
        """Each gradient is summed, and what is cut is gathered."""
        refreshed = filter(self.layout.refreshed, self.layout.local_units(rank))
        return (
            self._sum(self._summed, self.layout.local_units(rank))
            + self._sum(self._gathered, refreshed)
            + (self._fetched(rank, self._gathered))
        )

    def copies(self, rank: int) -> float:
        return self._fetched(rank, self._copy)

    def side(self, rank: int) -> float:
        """The second thread: it finishes the reductions of a step behind the updates of the one before."""
        units = self.layout.local_units(rank)
        return self._sum(self._settled, units) + self._sum(self._updated, units)

    @cached_property
    def messages(self) -> list[float]:
        """Messages from one pipeline rank to another."""
        return [self.layout.micro_batches * self._message * count for count in Counter(_channels(self.layout)).values()]

    @property
    def turn(self) -> float:
        """From one step to the next, where no rank begins before all have ended: the gradient of the first unit is
        summed last, all agree, and the unit is updated."""
        layout, (unit,) = self.layout, self.layout.units_of(0)
        begin = self._updated(unit)
        if layout.moves(unit) or layout.refreshed(unit):
            begin += self._copy(unit) + self._gathered(unit)
        return self._summed(unit) + self._settled(unit) + self.costs.network(Agree()) + begin

    @property
    def ways(self) -> list[float]:
        """The way of a micro-batch to the first position of each rank, and back from it."""
        layout = self.layout
        legs = [
            passes.way + (2 * self._message if layout.rank_of(here) != layout.rank_of(here + 1) else 0)
            for here, passes in enumerate(self._passes[:-1])
        ]
        to_position = [*accumulate(legs, initial=0.0)]
        return [to_position[min(layout.positions(rank))] for rank in range(layout.pipeline)]

    def _fetched(self, rank: int, cost: Callable[[int], float]) -> float:
        """What moves is fetched for the forward and for the backward pass, but for what stays in the window between
        them; the head has one pass."""
        return sum(self._fetched_in(rank, pool, cost) for pool in POOLS)

    def _fetched_in(self, rank: int, pool: Pool, cost: Callable[[int], float]) -> float:
        layout = self.layout
        once = [self._of_unit(cost, unit) for unit in layout.moving_units(rank, pool)]
        of_head = layout.units_of(layout.head)
        twice = [self._of_unit(cost, unit) for unit in layout.moving_units(rank, pool) if unit not in of_head]
        return sum(once) + sum(sorted(twice)[: max(0, len(twice) - layout.window)])

    @cached_property
    def _message(self) -> float:
        return self.costs.network(Send(Flow.ACTIVATION, 1, 0, 0)) if self.layout.pipeline > 1 else 0.0

    def _of_micro_batches(self, rank: int, part: Callable[[_Passes], float]) -> float:
        return self.layout.micro_batches * sum(part(self._passes[position]) for position in self.layout.positions(rank))

    @cached_property
    def _passes(self) -> list[_Passes]:
        """What a micro-batch costs at each position."""
        known: dict[Hashable, _Passes] = {}
        found = []
        for position in range(self.layout.head + 1):
            kind = self._kind(position)
            if kind not in known:
                known[kind] = self._first_passes(position)
            found.append(known[kind])
        return found

    def _first_passes(self, position: int) -> _Passes:
        # The head's backward pass holds its forward pass.
        passes = [Forward(position, 0)] if position != self.layout.head else []
        parts = with_parts(self.layout, [*passes, Backward(position, 0)])
        exchanges = [part for part in parts if isinstance(part, Exchange)]
        compute = sum(self.costs.compute(part) for part in parts if isinstance(part, Pass))
        early = sum(self.costs.compute(part) for part in parts if isinstance(part, Recompute))
        # The gradients of tokens are waited for; see `plan/spread.py`.
        wait = sum(self.costs.network(one) for one in exchanges if one.leg is Leg.DISPATCH_GRADIENT)
        return _Passes(compute, sum(map(self.costs.network, exchanges)), wait, compute - early + wait)

    def _kind(self, position: int) -> Hashable:
        kind = self.sizes.kind(position - 1) if 0 < position < self.layout.head else position
        return kind, tuple(self.sizes.units[unit].numel for unit in self.layout.units_of(position))

    def _sum(self, cost: Callable[[int], float], units: Iterable[int]) -> float:
        return sum(self._of_unit(cost, unit) for unit in units)

    def _of_unit(self, cost: Callable[[int], float], unit: int) -> float:
        layout = self.layout
        home, pool, users = layout.home(unit), layout.pool_of(unit), layout.users[unit]
        # Pipeline ranks that are further apart may not be on one machine.
        key = (cost.__name__, self.sizes.units[unit].numel, home, pool, len(users), users[-1] - users[0])
        if key not in self._of_units:
            self._of_units[key] = cost(unit)
        return self._of_units[key]

    def _summed(self, unit: int) -> float:
        return self.costs.network(Reduce(unit))

    def _gathered(self, unit: int) -> float:
        return self.costs.network(Fetch(unit))

    def _copy(self, unit: int) -> float:
        return self.costs.copy(Fetch(unit))

    def _settled(self, unit: int) -> float:
        return self.costs.settle(Reduce(unit))

    def _updated(self, unit: int) -> float:
        return self.costs.update(Update(unit))

    @cached_property
    def _of_units(self) -> dict[Hashable, float]:
        return {}


def _channels(layout: Layout) -> Iterator[tuple[int, int]]:
    """From which pipeline rank to which a micro-batch's activations and gradients go, message by message."""
    for position in range(layout.head):
        here, there = layout.rank_of(position), layout.rank_of(position + 1)
        if here != there:
            yield from ((here, there), (there, here))

"""Seconds that a step of a layout takes at least, from sums alone: no plan is made. Pure."""

from collections import Counter
from collections.abc import Iterable, Iterator

from pseudoreal_trainer.forecast.time.costs import Costs
from pseudoreal_trainer.plan.layout import Layout
from pseudoreal_trainer.plan.records import Backward, Fetch, Flow, Forward, Pass, Reduce, Send, Update
from pseudoreal_trainer.plan.spread import with_parts

_ROUNDING = 1e-9
"""Share by which a simulation, which adds in another order, may be below the same sum."""


def least_seconds(layout: Layout, costs: Costs) -> float:
    """A bound from below of a step's seconds, in the mean of many steps: each rank passes all of its micro-batches
    through all of its positions and sends what leaves it; it sums the gradient of each of its units at least once,
    gathers it at least once where it is cut, and updates it."""
    passes = [_pass(layout, costs, position) for position in range(layout.head + 1)]
    ranks = range(layout.pipeline)
    computes = [layout.micro_batches * sum(passes[p] for p in layout.positions(rank)) for rank in ranks]
    local = [layout.local_units(rank) for rank in ranks]
    collectives = [sum(_collectives(layout, costs, units)) for units in local]
    message = costs.network(Send(Flow.ACTIVATION, 1, 0, 0)) if layout.pipeline > 1 else 0.0
    channels = Counter(_channels(layout))
    messages = [layout.micro_batches * message * count for count in channels.values()]
    # A rank's second thread finishes the reductions of a step behind the updates of the one before.
    updates = [
        sum(map(costs.settle, map(Reduce, units))) + sum(map(costs.update, map(Update, units))) for units in local
    ]
    bounds = [*computes, *collectives, *messages, *updates]
    if costs.cores is not None:
        bounds.append((sum(computes) + sum(collectives) + sum(messages) + sum(updates)) / costs.cores)
    if layout.clipping == "Global":
        # No rank begins a step before all have ended the one before: the way of a micro-batch to a rank's first
        # position, and back from it, is not hidden.
        for rank in ranks:
            first = min(layout.positions(rank))
            crossed = sum(layout.rank_of(p) != layout.rank_of(p + 1) for p in range(first))
            bounds.append(sum(passes[:first]) + 2 * crossed * message + computes[rank])
    return max(bounds) * (1 - _ROUNDING)


def _channels(layout: Layout) -> Iterator[tuple[int, int]]:
    """From which pipeline rank to which a micro-batch's activations and gradients go, message by message."""
    for position in range(layout.head):
        here, there = layout.rank_of(position), layout.rank_of(position + 1)
        if here != there:
            yield from ((here, there), (there, here))


def _pass(layout: Layout, costs: Costs, position: int) -> float:
    """Seconds of a micro-batch's passes at a position, both ways."""
    # The head's backward pass holds its forward pass.
    passes = [Forward(position, 0)] if position != layout.head else []
    parts = with_parts(layout, [*passes, Backward(position, 0)])
    return sum(costs.compute(part) for part in parts if isinstance(part, Pass))


def _collectives(layout: Layout, costs: Costs, units: Iterable[int]) -> Iterator[float]:
    for unit in units:
        yield costs.network(Reduce(unit))
        if layout.moves(unit) or layout.refreshed(unit):
            yield costs.network(Fetch(unit))

"""Expert-parallel passes: their parts, and the all-to-all exchanges between them. Pure.

In each direction all ranks of a pipeline rank have the same records in the same order, even ranks whose experts receive
no tokens: an exchange needs all of its ranks.

Two micro-batches are in flight at a time, so that one travels while the experts compute on another. Tokens of all
neighbouring passes are counted at once: in layered order once per layer and step. A backward pass holds the graph of
one micro-batch, and of the next one, whose rows are travelling. The gradients of a micro-batch's tokens are waited for,
as a third graph would cost more memory than this wait is worth.

If a rank's experts are cut into groups, each group computes on all micro-batches before the next group. So a group is
fetched once in each direction, however many micro-batches there are. Meanwhile the rows of all micro-batches wait, and
backward also their graphs up to the experts.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import TypeGuard

from pseudoreal_trainer.plan.layout import Layout
from pseudoreal_trainer.plan.records import (
    Backward,
    Compute,
    Count,
    Exchange,
    ExpertBackward,
    ExpertForward,
    Forward,
    Leg,
    Pass,
    Recompute,
    Record,
    Route,
)

Part = Pass | Count | Exchange


def split_passes(layout: Layout, order: Iterable[Compute]) -> list[Part]:
    """Return the order of passes, with expert-parallel passes replaced by their parts."""
    found: list[Part] = []
    for (kind, position), passes in groupby(order, key=lambda one: (type(one), one.position)):
        stretch = [one.micro_batch for one in passes]
        if not layout.spreads(position):
            found.extend(kind(position, m) for m in stretch)
        elif kind is Forward:
            found.extend(_forward(layout, position, stretch))
        elif layout.expert_groups > 1:
            found.extend(_backward_in_groups(layout, position, stretch))
        else:
            found.extend(_backward(layout, position, stretch))
    return found


def takes_input(record: Record, layout: Layout) -> TypeGuard[Route | Forward]:
    """Return whether the record is the first of a forward pass to need the position's input."""
    return isinstance(record, Route) or (isinstance(record, Forward) and not layout.spreads(record.position))


def takes_input_again(record: Record, layout: Layout) -> TypeGuard[Recompute | Backward]:
    """Return whether the record is the first of a backward pass to need the position's input."""
    return isinstance(record, Recompute) or (isinstance(record, Backward) and not layout.spreads(record.position))


def takes_gradient(record: Record, layout: Layout) -> TypeGuard[Exchange | Backward]:
    """Return whether the record is the first to need the gradient of the position's output; the head has no such
    gradient."""
    if isinstance(record, Exchange):
        return record.leg is Leg.COMBINE_GRADIENT
    return isinstance(record, Backward) and record.position != layout.head and not layout.spreads(record.position)


def units_read(layout: Layout, record: Record) -> tuple[int, ...]:
    """Return the units whose weights the record needs."""
    if not isinstance(record, Pass):
        return ()
    if not layout.spreads(record.position):
        return layout.units_of(record.position)
    block, *experts = layout.units_of(record.position)
    match record:
        case ExpertForward(group=group) | ExpertBackward(group=group):
            return (experts[group],)
        case Forward():
            return ()
    return (block,)


def units_accumulated(layout: Layout, record: Record) -> tuple[int, ...]:
    """Return the units to whose gradients the record adds."""
    return units_read(layout, record) if isinstance(record, Backward | ExpertBackward) else ()


def _forward(layout: Layout, position: int, stretch: Sequence[int]) -> Iterator[Part]:
    yield from (Route(position, m) for m in stretch)
    for first, number in _neighbouring(stretch):
        yield Count(position, first, number)
    if layout.expert_groups > 1:
        yield from _through_groups(layout, position, stretch)
    else:
        yield from _through_experts(position, stretch)


def _through_experts(position: int, stretch: Sequence[int]) -> Iterator[Part]:
    yield Exchange(Leg.DISPATCH, position, stretch[0])
    for before, m, behind in _with_neighbours(stretch):
        yield from (Exchange(Leg.DISPATCH, position, following) for following in behind)
        yield ExpertForward(position, m)
        yield Exchange(Leg.COMBINE, position, m)
        yield from (Forward(position, earlier) for earlier in before)
    yield Forward(position, stretch[-1])


def _through_groups(layout: Layout, position: int, stretch: Sequence[int]) -> Iterator[Part]:
    yield from (Exchange(Leg.DISPATCH, position, m) for m in stretch)
    for group in range(layout.expert_groups):
        yield from (ExpertForward(position, m, group) for m in stretch)
    yield Exchange(Leg.COMBINE, position, stretch[0])
    for _, m, behind in _with_neighbours(stretch):
        yield from (Exchange(Leg.COMBINE, position, following) for following in behind)
        yield Forward(position, m)


def _backward_in_groups(layout: Layout, position: int, stretch: Sequence[int]) -> Iterator[Part]:
    for m in stretch:
        yield from _first_of_backward(layout, position, m)
    for group in range(layout.expert_groups):
        yield from (ExpertBackward(position, m, group) for m in stretch)
    yield Exchange(Leg.DISPATCH_GRADIENT, position, stretch[0])
    for _, m, behind in _with_neighbours(stretch):
        yield from (Exchange(Leg.DISPATCH_GRADIENT, position, following) for following in behind)
        yield Backward(position, m)


def _backward(layout: Layout, position: int, stretch: Sequence[int]) -> Iterator[Part]:
    yield from _first_of_backward(layout, position, stretch[0])
    for _, m, behind in _with_neighbours(stretch):
        for following in behind:
            yield from _first_of_backward(layout, position, following)
        yield ExpertBackward(position, m)
        yield Exchange(Leg.DISPATCH_GRADIENT, position, m)
        yield Backward(position, m)


def _first_of_backward(layout: Layout, position: int, m: int) -> Iterator[Part]:
    if layout.recompute:
        yield Recompute(position, m)
        yield Exchange(Leg.DISPATCH_AGAIN, position, m)
    yield Exchange(Leg.COMBINE_GRADIENT, position, m)


def _with_neighbours(numbers: Sequence[int]) -> Iterator[tuple[Sequence[int], int, Sequence[int]]]:
    """Return each number with the number before it and the number after it, if there are such numbers."""
    return ((numbers[max(0, i - 1) : i], number, numbers[i + 1 : i + 2]) for i, number in enumerate(numbers))


def _neighbouring(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield runs of consecutive numbers: the first number of each run, and the length."""
    for _, run in groupby(enumerate(numbers), key=lambda item: item[1] - item[0]):
        found = [number for _, number in run]
        yield found[0], len(found)

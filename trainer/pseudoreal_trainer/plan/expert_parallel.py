"""Expert parallelism: the parts of a pass through experts on several ranks, and the all-to-all exchanges between them.
Pure.

All data ranks of a pipeline rank have the same records in the same order. This includes ranks whose experts receive no
tokens: an exchange needs all of its ranks.

Two micro-batches are in flight at a time, so that the rows of one travel while the experts compute on the other. The
tokens of consecutive micro-batches at a layer are counted together: with the schedule Layered, once per layer and step.
During backward passes, two graphs are in memory: the graph of the current micro-batch, and the graph of the next one,
whose rows travel. The main thread waits for the gradients of a micro-batch's tokens: avoiding this wait would take a
third graph, which costs more memory than the wait is worth.

If a rank's experts are cut into groups, each group computes on all micro-batches before the next group. So a group is
fetched once in each direction, however many micro-batches there are. Meanwhile the rows of all micro-batches stay in
memory, and in the backward direction also the graphs up to the experts.
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

PassPart = Pass | Count | Exchange
"""A pass, or one of the records into which an expert-parallel pass is split."""


def split_passes(layout: Layout, order: Iterable[Compute]) -> list[PassPart]:
    """Return the order of passes, with expert-parallel passes replaced by their parts."""
    found: list[PassPart] = []
    for (kind, position), passes in groupby(order, key=lambda one: (type(one), one.position)):
        micro_batches = [one.micro_batch for one in passes]
        if not layout.spreads(position):
            found.extend(kind(position, m) for m in micro_batches)
        elif kind is Forward:
            found.extend(_forward(layout, position, micro_batches))
        elif layout.expert_groups > 1:
            found.extend(_backward_in_groups(layout, position, micro_batches))
        else:
            found.extend(_backward(layout, position, micro_batches))
    return found


def is_first_use_of_input(record: Record, layout: Layout) -> TypeGuard[Route | Forward]:
    """Return whether the record is the first of a forward pass to need the position's input."""
    return isinstance(record, Route) or (isinstance(record, Forward) and not layout.spreads(record.position))


def is_first_reuse_of_input(record: Record, layout: Layout) -> TypeGuard[Recompute | Backward]:
    """Return whether the record is the first of a backward pass to need the position's input."""
    return isinstance(record, Recompute) or (isinstance(record, Backward) and not layout.spreads(record.position))


def is_first_use_of_gradient(record: Record, layout: Layout) -> TypeGuard[Exchange | Backward]:
    """Return whether the record is the first to need the gradient of the position's output; the head's output has no
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


def _forward(layout: Layout, position: int, micro_batches: Sequence[int]) -> Iterator[PassPart]:
    yield from (Route(position, m) for m in micro_batches)
    for first, number in _consecutive_runs(micro_batches):
        yield Count(position, first, number)
    if layout.expert_groups > 1:
        yield from _through_groups(layout, position, micro_batches)
    else:
        yield from _through_experts(position, micro_batches)


def _through_experts(position: int, micro_batches: Sequence[int]) -> Iterator[PassPart]:
    yield Exchange(Leg.DISPATCH, position, micro_batches[0])
    for earlier, m, later in _with_neighbours(micro_batches):
        yield from (Exchange(Leg.DISPATCH, position, following) for following in later)
        yield ExpertForward(position, m)
        yield Exchange(Leg.COMBINE, position, m)
        yield from (Forward(position, previous) for previous in earlier)
    yield Forward(position, micro_batches[-1])


def _through_groups(layout: Layout, position: int, micro_batches: Sequence[int]) -> Iterator[PassPart]:
    yield from (Exchange(Leg.DISPATCH, position, m) for m in micro_batches)
    for group in range(layout.expert_groups):
        yield from (ExpertForward(position, m, group) for m in micro_batches)
    yield Exchange(Leg.COMBINE, position, micro_batches[0])
    for _, m, later in _with_neighbours(micro_batches):
        yield from (Exchange(Leg.COMBINE, position, following) for following in later)
        yield Forward(position, m)


def _backward_in_groups(layout: Layout, position: int, micro_batches: Sequence[int]) -> Iterator[PassPart]:
    for m in micro_batches:
        yield from _start_of_backward(layout, position, m)
    for group in range(layout.expert_groups):
        yield from (ExpertBackward(position, m, group) for m in micro_batches)
    yield Exchange(Leg.DISPATCH_GRADIENT, position, micro_batches[0])
    for _, m, later in _with_neighbours(micro_batches):
        yield from (Exchange(Leg.DISPATCH_GRADIENT, position, following) for following in later)
        yield Backward(position, m)


def _backward(layout: Layout, position: int, micro_batches: Sequence[int]) -> Iterator[PassPart]:
    yield from _start_of_backward(layout, position, micro_batches[0])
    for _, m, later in _with_neighbours(micro_batches):
        for following in later:
            yield from _start_of_backward(layout, position, following)
        yield ExpertBackward(position, m)
        yield Exchange(Leg.DISPATCH_GRADIENT, position, m)
        yield Backward(position, m)


def _start_of_backward(layout: Layout, position: int, m: int) -> Iterator[PassPart]:
    if layout.recompute:
        yield Recompute(position, m)
        yield Exchange(Leg.DISPATCH_AGAIN, position, m)
    yield Exchange(Leg.COMBINE_GRADIENT, position, m)


def _with_neighbours(numbers: Sequence[int]) -> Iterator[tuple[Sequence[int], int, Sequence[int]]]:
    """Yield (previous number or nothing, number, next number or nothing) for each number."""
    return ((numbers[max(0, i - 1) : i], number, numbers[i + 1 : i + 2]) for i, number in enumerate(numbers))


def _consecutive_runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield (first number, length) of each run of consecutive numbers."""
    for _, run in groupby(enumerate(numbers), key=lambda item: item[1] - item[0]):
        found = [number for _, number in run]
        yield found[0], len(found)

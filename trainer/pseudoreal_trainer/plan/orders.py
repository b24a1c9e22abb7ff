"""The order of forward and backward passes on each pipeline rank, and the gradient buffers that it needs. Pure.

layered: breadth-first, with modular placement (Lamy-Poirier, arXiv 2106.02679 and 2211.05953). gpipe: Huang et al.,
arXiv 1811.06965. 1f1b: Narayanan et al., arXiv 2006.09503. interleaved: Narayanan et al., arXiv 2104.04473.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import chain, zip_longest

from pseudoreal_api.resolved.resolve import check_interleaved

from pseudoreal_trainer.plan.expert_parallel import split_passes, units_accumulated
from pseudoreal_trainer.plan.layout import POOLS, Layout, Pool
from pseudoreal_trainer.plan.records import Backward, Compute, Forward


def compute_order(layout: Layout, rank: int) -> list[Compute]:
    """Return the forward and backward passes of a pipeline rank, in order. Raises ValueError if the order does not fit
    the numbers of layers, pipeline ranks and micro-batches."""
    orders = {"Layered": _layered, "GPipe": _gpipe, "1F1B": _one_forward_one_backward, "Interleaved": _interleaved}
    return list(orders[layout.order](layout, rank))


def evaluation_order(layout: Layout, rank: int) -> list[Compute]:
    """Return the forward passes of a pipeline rank, layer after layer."""
    return [Forward(p, m) for p in layout.positions(rank) for m in range(layout.micro_batches)]


def _layered(layout: Layout, rank: int) -> Iterator[Compute]:
    """Yield the order Layered: all micro-batches through one layer, then through the next."""
    positions, micro_batches = layout.positions(rank), range(layout.micro_batches)
    yield from (Forward(p, m) for p in positions if p != layout.head for m in micro_batches)
    yield from (Backward(p, m) for p in reversed(positions) for m in micro_batches)


def _gpipe(layout: Layout, rank: int) -> Iterator[Compute]:
    positions, micro_batches = layout.positions(rank), range(layout.micro_batches)
    for m in micro_batches:
        yield from _forward(layout, positions, m)
    for m in micro_batches:
        yield from _backward(positions, m)


def _one_forward_one_backward(layout: Layout, rank: int) -> Iterator[Compute]:
    positions, count = layout.positions(rank), layout.micro_batches
    forward = [list(_forward(layout, positions, m)) for m in range(count)]
    backward = [list(_backward(positions, m)) for m in range(count)]
    return _alternate(forward, backward, warmup=layout.pipeline - 1 - rank)


def _interleaved(layout: Layout, rank: int) -> Iterator[Compute]:
    """Yield the order Interleaved: rounds of micro-batches. In each round a rank runs all of its chunks, one after the
    other. A chunk is one layer."""
    check_interleaved(layout.layers, layout.pipeline, layout.micro_batches)
    chunks = _model_chunks(layout, rank)
    width = layout.micro_batches // max(1, layout.micro_batches // layout.pipeline)
    rounds = [range(first, first + width) for first in range(0, layout.micro_batches, width)]
    forward = [list(_forward(layout, chunk, m)) for part in rounds for chunk in chunks for m in part]
    backward = [list(_backward(chunk, m)) for part in rounds for chunk in reversed(chunks) for m in part]
    warmup = (len(chunks) - 1) * width + 2 * (layout.pipeline - 1 - rank)
    return _alternate(forward, backward, warmup)


def _model_chunks(layout: Layout, rank: int) -> list[tuple[int, ...]]:
    """Return the positions of the rank's chunks, one layer each. The embedding belongs to the first layer's chunk, the
    head to the last layer's."""
    chunks: list[tuple[int, ...]] = [(p,) for p in layout.positions(rank) if 0 < p < layout.head]
    if layout.rank_of(0) == rank:
        chunks[0] = (0, *chunks[0])
    if layout.rank_of(layout.head) == rank:
        chunks[-1] = (*chunks[-1], layout.head)
    return chunks


def _alternate(forward: list[list[Compute]], backward: list[list[Compute]], warmup: int) -> Iterator[Compute]:
    """Yield `warmup` entries of `forward`, then one entry of each list in turn, and finally the rest of `backward`."""
    yield from chain.from_iterable(forward[:warmup])
    for ahead, back in zip_longest(forward[warmup:], backward, fillvalue=()):
        yield from chain(ahead, back)


def _forward(layout: Layout, positions: Iterable[int], micro_batch: int) -> Iterator[Compute]:
    return (Forward(p, micro_batch) for p in positions if p != layout.head)


def _backward(positions: tuple[int, ...], micro_batch: int) -> Iterator[Compute]:
    return (Backward(p, micro_batch) for p in reversed(positions))


def gradient_buffers(layout: Layout, rank: int) -> list[list[int]]:
    """Return the units of each gradient buffer of a rank, in the order of their use.

    In each pool, n gradients accumulate at the same time at most. The pool has n + 1 buffers, one of them for a
    reduction in flight, and never more buffers than units.
    """
    return [units for pool in POOLS for units in _buffers_of_pool(layout, rank, pool)]


def _buffers_of_pool(layout: Layout, rank: int, pool: Pool) -> Iterable[list[int]]:
    ranges = _accumulation_ranges(replace(layout, homes=(), sharding="None", replicas=1), rank)
    units = sorted(layout.buffered_units(rank, pool), key=lambda unit: ranges[unit].start)
    overlapping = max((sum(ranges[one].start in ranges[other] for other in units) for one in units), default=0)
    count = min(overlapping + 1, len(units))
    buffers = {unit: [unit] for unit in units[:count]}
    """Newest unit of each buffer -> all units of the buffer."""
    for unit in units[count:]:
        # The buffer whose gradient is complete first: its reduction has the most time before the buffer is needed.
        earliest = min(buffers, key=lambda newest: ranges[newest].stop)
        buffers[unit] = [*buffers.pop(earliest), unit]
    return buffers.values()


@lru_cache
def _accumulation_ranges(layout: Layout, rank: int) -> dict[int, range]:
    """Return unit -> range of the rank's passes in which its gradient accumulates."""
    ranges: dict[int, range] = {}
    parts = split_passes(layout, compute_order(layout, rank))
    for index, record in enumerate(parts):
        for unit in units_accumulated(layout, record):
            # The gradient of a cross-stage unit is reduced after all passes.
            end = len(parts) if layout.is_common(unit) else index + 1
            ranges[unit] = range(ranges[unit].start if unit in ranges else index, end)
    return ranges

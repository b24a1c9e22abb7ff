"""How many gradients of a rank are in memory at a time, by the order of its passes. Pure."""

from dataclasses import replace
from functools import lru_cache

from pseudoreal_trainer.plan.layout import Layout, Pool
from pseudoreal_trainer.plan.orders import compute_order
from pseudoreal_trainer.plan.spread import units_grown, with_parts


def gradient_buffers(layout: Layout, rank: int, pool: Pool) -> int:
    """Number of whole gradients that exist at a time, of units of a pool that share buffers: those that grow, and one
    that is being reduced meanwhile."""
    spans = _growth(replace(layout, homes=(), sharding="None", replicas=1), rank)
    sharing = [spans[unit] for unit in layout.buffered_units(rank, pool)]
    growing = max((sum(span.start in other for other in sharing) for span in sharing), default=0)
    return min(growing + 1, len(sharing))


@lru_cache
def _growth(layout: Layout, rank: int) -> dict[int, range]:
    """Unit -> the part of the rank's passes in which its gradient grows."""
    spans: dict[int, range] = {}
    parts = with_parts(layout, compute_order(layout, rank))
    for index, record in enumerate(parts):
        for unit in units_grown(layout, record):
            # What other pipeline ranks have a part in is reduced behind all passes.
            end = len(parts) if layout.is_common(unit) else index + 1
            spans[unit] = range(spans[unit].start if unit in spans else index, end)
    return spans

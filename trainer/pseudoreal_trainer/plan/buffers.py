"""Number of gradient buffers of a rank, from the order of its passes. Pure."""

from dataclasses import replace
from functools import lru_cache

from pseudoreal_trainer.plan.expert_parallel import split_passes, units_accumulated
from pseudoreal_trainer.plan.layout import Layout, Pool
from pseudoreal_trainer.plan.orders import compute_order


def gradient_buffers(layout: Layout, rank: int, pool: Pool) -> int:
    """Return the number of gradient buffers that units of a pool share: for the gradients that accumulate at the same
    time, and one that is being reduced meanwhile."""
    spans = _growth(replace(layout, homes=(), sharding="None", replicas=1), rank)
    sharing = [spans[unit] for unit in layout.buffered_units(rank, pool)]
    growing = max((sum(span.start in other for other in sharing) for span in sharing), default=0)
    return min(growing + 1, len(sharing))


@lru_cache
def _growth(layout: Layout, rank: int) -> dict[int, range]:
    """Return unit -> range of the rank's passes in which its gradient accumulates."""
    spans: dict[int, range] = {}
    parts = split_passes(layout, compute_order(layout, rank))
    for index, record in enumerate(parts):
        for unit in units_accumulated(layout, record):
            # The gradient of a cross-stage unit is reduced after all passes.
            end = len(parts) if layout.is_common(unit) else index + 1
            spans[unit] = range(spans[unit].start if unit in spans else index, end)
    return spans

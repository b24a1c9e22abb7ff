"""Bytes that a rank holds through the whole step, by tier: state, working copies, the window, buffers. Pure."""

from dataclasses import dataclass

from pseudoreal_trainer.plan.layout import Layout
from pseudoreal_trainer.plan.sizes import Sizes

MOMENTS = 2
READ_AHEAD = 2
"""Shards that are read from disk ahead of their fetch."""
CHUNK_ELEMENTS = 2**20
CHUNK_ARRAYS = 3 * 4
"""Weights, moments and gradient, of a chunk that is read, one that is updated and one that is written."""


@dataclass(frozen=True)
class Tiers:
    device: int = 0
    host: int = 0
    disk: int = 0

    def __add__(self, other: "Tiers") -> "Tiers":
        return Tiers(self.device + other.device, self.host + other.host, self.disk + other.disk)


def held(layout: Layout, sizes: Sizes, rank: int) -> Tiers:
    """Of each data rank of a pipeline rank, without activations."""
    units = layout.local_units(rank)
    state = sum((unit_state(layout, sizes, unit) for unit in units), Tiers())
    room = Tiers(device=_window(layout, sizes, rank) + _gradient_room(layout, sizes, rank))
    return state + room + _staging(layout, sizes, units)


def unit_state(layout: Layout, sizes: Sizes, unit: int) -> Tiers:
    """Master weights, moments, gradient and the copies that stay."""
    c, f, shard = sizes.compute_bytes, sizes.master_bytes, sizes.shard(layout, unit)
    masters_and_moments = (1 + MOMENTS) * f * shard
    copy = c * shard if sizes.has_own_copies else 0
    match layout.home(unit):
        case "host":
            return Tiers(host=masters_and_moments + copy + f * shard)
        case "disk":
            gradient = f * shard if layout.clipping == "global" else 0
            return Tiers(disk=masters_and_moments + copy + gradient)
        case "device" if layout.moves(unit):
            return Tiers(device=masters_and_moments + f * shard)
        case "device":
            # Where both have one type, the shard of master weights is a part of the working copy.
            masters = f * shard if sizes.has_own_copies else 0
            whole = shard * layout.shards
            gradient = f * (shard if has_gradient_shard(layout, unit) else whole)
            return Tiers(device=c * whole + masters + MOMENTS * f * shard + gradient)


def has_gradient_shard(layout: Layout, unit: int) -> bool:
    """Its gradient is whole only until it is reduced."""
    return layout.moves(unit) or (layout.sharding in ("gradients", "full") and layout.data > 1)


def _window(layout: Layout, sizes: Sizes, rank: int) -> int:
    moving = [unit for unit in layout.local_units(rank) if layout.moves(unit)]
    largest = max((sizes.whole(layout, unit) for unit in moving), default=0)
    return min(layout.window, len(moving)) * largest * sizes.compute_bytes


def gradient_buffers(layout: Layout, rank: int) -> int:
    """How many whole gradients of units without room of their own exist at a time: those that grow, and one that is
    being reduced."""
    units = [unit for unit in layout.local_units(rank) if has_gradient_shard(layout, unit)]
    growing = _most_growing(layout, rank, units) if layout.order == "layered" else len(units)
    return min(growing + 1, len(units))


def _most_growing(layout: Layout, rank: int, units: list[int]) -> int:
    """In layered order a gradient grows from the last to the first position of its unit."""
    places: dict[int, list[int]] = {unit: [] for unit in units}
    for position in layout.positions(rank):
        places.get(layout.unit_of(position), []).append(position)
    spans = [range(found[0], found[-1] + 1) for found in places.values()]
    return max((sum(position in span for span in spans) for position in layout.positions(rank)), default=0)


def _gradient_room(layout: Layout, sizes: Sizes, rank: int) -> int:
    units = [unit for unit in layout.local_units(rank) if has_gradient_shard(layout, unit)]
    largest = max((sizes.whole(layout, unit) for unit in units), default=0)
    return gradient_buffers(layout, rank) * largest * sizes.master_bytes


def _staging(layout: Layout, sizes: Sizes, units: tuple[int, ...]) -> Tiers:
    """Host memory through which the units on disk pass, however many they are."""
    largest = max((sizes.shard(layout, unit) for unit in units if layout.home(unit) == "disk"), default=0)
    chunks = CHUNK_ARRAYS * min(largest, CHUNK_ELEMENTS) * sizes.master_bytes
    return Tiers(host=READ_AHEAD * largest * sizes.compute_bytes + chunks)

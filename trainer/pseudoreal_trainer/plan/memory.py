"""Bytes that a rank holds through the whole step, by tier: state, working copies, the window, buffers. Pure."""

from dataclasses import dataclass, replace
from functools import lru_cache

from pseudoreal_trainer.plan.layout import Layout
from pseudoreal_trainer.plan.orders import compute_order
from pseudoreal_trainer.plan.sizes import Sizes
from pseudoreal_trainer.plan.steps import Backward

MOMENTS = 2
CHUNK_ELEMENTS = 2**20
_CHUNKS_AT_A_TIME = 3
"""One is read, one updated, one written: each with weights, moments, gradient and weights in the compute type."""

KEPT_GRADIENTS = 2
"""Reduced gradients of units that are updated at once: of the one whose update is under way, and of the next."""

_MEASURING_PARTS = 4


@dataclass(frozen=True)
class Tiers:
    device: int = 0
    host: int = 0
    disk: int = 0

    def __add__(self, other: "Tiers") -> "Tiers":
        return Tiers(self.device + other.device, self.host + other.host, self.disk + other.disk)


def held(layout: Layout, sizes: Sizes, rank: int) -> Tiers:
    """Of each data rank of a pipeline rank, without activations."""
    state = sum((unit_state(layout, sizes, unit) for unit in layout.local_units(rank)), Tiers())
    room = Tiers(
        device=_window(layout, sizes, rank) + _gradient_room(layout, sizes, rank) + _measuring_room(layout, sizes, rank)
    )
    return state + room + _staging(layout, sizes, rank) + Tiers(host=sizes.checkpoint_buffer)


def unit_state(layout: Layout, sizes: Sizes, unit: int) -> Tiers:
    """Master weights, moments, gradient and the copies that stay."""
    c, f, shard = sizes.compute_bytes, sizes.master_bytes, sizes.shard(layout, unit)
    masters_and_moments = (1 + MOMENTS) * f * shard
    # Where both have one type, master weights serve as they are.
    copy = c * shard if sizes.has_own_copies else 0
    match layout.home(unit):
        case "host":
            return Tiers(host=masters_and_moments + copy + f * shard)
        case "disk":
            gradient = f * shard if layout.gradients_on_disk else 0
            return Tiers(disk=masters_and_moments + copy + gradient)
        case "device" if layout.moves(unit):
            return Tiers(device=masters_and_moments + copy + f * shard)
        case "device":
            masters, whole = f * shard if sizes.has_own_copies else 0, sizes.whole(layout, unit)
            gradient = f * (shard if layout.has_gradient_shard(unit) else whole)
            return Tiers(device=c * whole + masters + MOMENTS * f * shard + gradient)


def gradient_buffers(layout: Layout, rank: int) -> int:
    """How many whole gradients of units without room of their own exist at a time: those that grow, and one that is
    being reduced meanwhile."""
    spans = _growth(replace(layout, homes=(), sharding="none"), rank)
    sharing = [spans[unit] for unit in layout.local_units(rank) if layout.has_gradient_shard(unit)]
    growing = max((sum(span.start in other for other in sharing) for span in sharing), default=0)
    return min(growing + 1, len(sharing))


@lru_cache
def _growth(layout: Layout, rank: int) -> dict[int, range]:
    """Unit -> the part of the rank's passes in which its gradient grows."""
    spans: dict[int, range] = {}
    for index, compute in enumerate(compute_order(layout, rank)):
        if isinstance(compute, Backward):
            unit = layout.unit_of(compute.position)
            spans[unit] = range(spans[unit].start if unit in spans else index, index + 1)
    return spans


def _window(layout: Layout, sizes: Sizes, rank: int) -> int:
    moving = [unit for unit in layout.local_units(rank) if layout.moves(unit)]
    largest = max((sizes.whole(layout, unit) for unit in moving), default=0)
    return min(layout.window, len(moving)) * largest * sizes.compute_bytes


def _gradient_room(layout: Layout, sizes: Sizes, rank: int) -> int:
    sharing = [unit for unit in layout.local_units(rank) if layout.has_gradient_shard(unit)]
    largest = max((sizes.whole(layout, unit) for unit in sharing), default=0)
    return gradient_buffers(layout, rank) * largest * sizes.master_bytes


def _measuring_room(layout: Layout, sizes: Sizes, rank: int) -> int:
    """Whole gradients of the layers that are under way at a time, and of each shared block the reduced ones: of the
    layer, of the one above it, and two sums."""
    shared = [position for position in layout.positions(rank) if layout.shares(position)]
    if not layout.measures or not shared:
        return 0
    under_way = 1 if layout.order == "layered" else len(shared)
    largest = max(sizes.whole(layout, layout.unit_of(position)) for position in shared)
    blocks = len({layout.unit_of(position) for position in shared})
    return (under_way + _MEASURING_PARTS * blocks) * largest * sizes.master_bytes


def _staging(layout: Layout, sizes: Sizes, rank: int) -> Tiers:
    """Host memory through which the units on disk pass, however many they are: fetches under way, the one that is read
    ahead, chunks of the update, and gradients whose update follows at once."""
    on_disk = [unit for unit in layout.local_units(rank) if layout.home(unit) == "disk"]
    largest = max((sizes.shard(layout, unit) for unit in on_disk), default=0)
    chunks = _CHUNKS_AT_A_TIME * 5 * min(largest, CHUNK_ELEMENTS) * sizes.master_bytes
    gradients = 0 if layout.gradients_on_disk else min(KEPT_GRADIENTS, len(on_disk)) * largest * sizes.master_bytes
    return Tiers(host=(layout.window + 1) * largest * sizes.compute_bytes + chunks + gradients)

"""Bytes that a rank holds through the whole step, by tier: state, working copies, window, buffers. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass

from pseudoreal_trainer.plan.layout import POOLS, Layout, Pool
from pseudoreal_trainer.plan.memory.communicators import COMMUNICATOR_BYTES, communicators
from pseudoreal_trainer.plan.memory.pinned_arena import (
    PAGE,
    TOKEN_BYTES,
    arena_layout,
    has_state_on_device,
    needs_tokens,
    token_bytes,
)
from pseudoreal_trainer.plan.newton_schulz import scratch_bytes
from pseudoreal_trainer.plan.orders import gradient_buffers
from pseudoreal_trainer.plan.sizes import MOMENTS, Device, Sizes, blocks_of, rounded_elements

CHUNK_ELEMENTS = 2**20
"""Number of elements of each vector that are in memory at a time, during an update of a unit on disk."""
CHUNKS_AT_A_TIME = 3
"""Number of chunks in memory at a time: one is read, one is updated, one is written."""
PIECE_ELEMENTS = 1 << 19
"""Number of elements that each thread updates at a time on the host. Their gradient is scaled in a scratch buffer."""
LAUNCHING_THREADS = 2
"""Threads of a rank that launch kernels on an accelerator: the main thread and autograd's."""
ROUNDED_ELEMENTS_ON_DEVICE = 1 << 21
"""Number of elements whose moments are widened and rounded at a time on a device."""
UNPACKED_ELEMENTS = 1 << 18
"""Number of elements of moments in blocks that are unpacked at a time for a checkpoint."""
_UNPACKED_BYTES = UNPACKED_ELEMENTS * (2 + 2 * 4 + 1) + 4 * blocks_of(UNPACKED_ELEMENTS)
"""Their bytes: in bfloat16, and scratch memory as for packing."""
PORTION_BYTES = 4 << 20
"""Maximum bytes that a checkpoint copies out of a home at a time."""
PORTION_ROOM = PORTION_BYTES + 2 * PAGE
"""Maximum bytes read from a disk for such a portion, in whole pages."""

_MEASURING_PARTS = 4


@dataclass(frozen=True)
class Tiers:
    device: int = 0
    host: int = 0
    disk: int = 0
    pinned: int = 0
    """Bytes of `host` that are pinned for copies to and from a GPU."""

    def __add__(self, other: "Tiers") -> "Tiers":
        return Tiers(
            self.device + other.device, self.host + other.host, self.disk + other.disk, self.pinned + other.pinned
        )


def resident_bytes(layout: Layout, sizes: Sizes, rank: int) -> Tiers:
    """Return the bytes that a pipeline rank holds through the whole step, without activations, on its most loaded data
    rank."""
    state = sum((unit_state(layout, sizes, unit) for unit in layout.local_units(rank)), Tiers())
    working = Tiers(
        device=sum(
            _window(layout, sizes, rank, pool)
            + _measuring_buffers(layout, sizes, rank, pool)
            + _shard_copies(layout, sizes, rank, pool)
            for pool in POOLS
        )
        + sum(
            _gradient_buffer(layout, sizes, units) + _reduction_result(layout, sizes, units)
            for units in gradient_buffers(layout, rank)
        )
        + (0 if layout.context_ranks > 1 else sizes.mask)
        + _tokens_on_device(layout, sizes, rank)
        + _communicator_bytes(layout, sizes, rank)
        + _rounding_on_device(layout, sizes, rank)
        + _gradient_rounding(layout, sizes, rank)
        + _orthogonalization_on_device(layout, sizes, rank)
    )
    updating = Tiers(
        host=_update_chunks(layout, sizes, rank)
        + _scaled_gradients(layout, sizes, rank)
        + _rounding_on_host(layout, sizes, rank)
        + _orthogonalization_on_host(layout, sizes, rank)
    )
    arena, tokens = _arena_buffers(layout, sizes, rank), _token_buffers(layout, sizes, rank)
    return state + working + arena + tokens + _checkpoint_ring(layout, sizes, rank) + updating


def min_resident_device_bytes(layout: Layout, sizes: Sizes, rank: int) -> int:
    """Return a lower bound of `resident_bytes(...).device`: the device bytes that do not depend on the order of passes.
    These are the state, the window, and two gradient buffers per pool, one in a reduction while the other accumulates:
    one for the largest unit, and one for at least the smallest."""
    state = sum(unit_state(layout, sizes, unit).device for unit in layout.local_units(rank))
    return state + sum(
        _window(layout, sizes, rank, pool) + _min_gradient_buffers(layout, sizes, rank, pool) for pool in POOLS
    )


def _min_gradient_buffers(layout: Layout, sizes: Sizes, rank: int, pool: Pool) -> int:
    elements = sorted(sizes.whole(layout, unit) for unit in layout.buffered_units(rank, pool))
    return sum(elements[-1:] + elements[:-1][:1]) * sizes.master_bytes


def unit_state(layout: Layout, sizes: Sizes, unit: int) -> Tiers:
    """Return the bytes of a unit's master weights, moments, gradient and resident copies."""
    c, f, shard = sizes.compute_bytes, sizes.master_bytes, sizes.shard(layout, unit)
    masters_and_moments = sizes.state_bytes(shard) - sizes.omitted_state_bytes(unit)
    # With equal types, master weights also serve as working copies.
    copy = c * shard if sizes.has_own_copies else 0
    # Without global clipping, the update follows the reduction at once, and the gradient passes through a buffer shared
    # by all units.
    gradient = sizes.gradient_bytes * shard if layout.keeps_gradients else 0
    previous = masters_and_moments if layout.is_speculative(unit) else 0
    gathered = c * sizes.whole(layout, unit) if layout.is_common(unit) else 0
    match layout.home(unit):
        case "Host":
            return Tiers(device=gathered, host=masters_and_moments + copy + gradient + previous)
        case "Disk":
            return Tiers(device=gathered, disk=masters_and_moments + copy + gradient)
        case "Device" if layout.moves(unit):
            return Tiers(device=masters_and_moments + copy + f * shard)
        case "Device":
            # Without own copies, the working copy serves as master weights.
            masters, whole = 0 if sizes.has_own_copies else f * shard, sizes.whole(layout, unit)
            grown = f * (shard if layout.has_gradient_shard(unit) else whole)
            return Tiers(device=c * whole + masters_and_moments - masters + grown)


def _window(layout: Layout, sizes: Sizes, rank: int, pool: Pool) -> int:
    largest = max((sizes.whole(layout, unit) for unit in layout.moving_units(rank, pool)), default=0)
    return layout.slots(rank, pool) * largest * sizes.compute_bytes


def _gradient_buffer(layout: Layout, sizes: Sizes, units: Iterable[int]) -> int:
    """Return the bytes of the gradient buffer of these units."""
    return max(sizes.whole(layout, unit) for unit in units) * sizes.master_bytes


def _shard_copies(layout: Layout, sizes: Sizes, rank: int, pool: Pool) -> int:
    """Return the bytes of shards on their way from the host or the disk into the slots of the window: the all-gather
    into a slot reads this rank's shard from the device. A unit without other holders is copied into its slot."""
    if sizes.device == "cpu":
        return 0  # there the all-gather reads the home itself
    sharded = [unit for unit in layout.moving_units(rank, pool) if _crosses_in_parts(layout, unit)]
    largest = max((sizes.shard(layout, unit) for unit in sharded), default=0)
    return min(layout.slots(rank, pool), len(sharded)) * sizes.allocated(largest * sizes.compute_bytes)


def _reduction_result(layout: Layout, sizes: Sizes, units: Iterable[int]) -> int:
    """Return the bytes of this rank's part of a reduced gradient on its way to another home, for the gradient buffer of
    these units. A reduction holds the buffer from its start until its result is in the home, so each buffer has at most
    one result."""
    sharded = [unit for unit in units if _crosses_in_parts(layout, unit)]
    if sizes.device == "cpu":
        # There a reduction writes into a gradient that the host keeps, unless it is rounded.
        writes_into_home = layout.keeps_gradients and not sizes.rounds_gradients
        sharded = [unit for unit in sharded if layout.home(unit) == "Disk" or not writes_into_home]
    largest = max((sizes.shard(layout, unit) for unit in sharded), default=0)
    return sizes.allocated(largest * sizes.master_bytes)


def _crosses_in_parts(layout: Layout, unit: int) -> bool:
    """Return True if weights and gradients of a unit cross between its home and the device in one shard per rank."""
    return layout.home(unit) != "Device" and layout.shards(unit) > 1


def _tokens_on_device(layout: Layout, sizes: Sizes, rank: int) -> int:
    """Return the bytes of a step's tokens on a GPU and, if documents are masked, of their positions: of whole
    sequences, and of the rank's parts of them. On a CPU, tokens stay where the batch has them."""
    if sizes.device == "cpu" or not needs_tokens(layout, rank, masks_documents=sizes.masks_documents):
        return 0
    sequences, length = sizes.max_sequences(layout), sizes.model.sequence_length
    tokens = sizes.allocated(token_bytes([(sequences, length)]))
    lengths = [length] if layout.context_ranks == 1 else [length, length // layout.context_ranks]
    of_documents = sum(sizes.allocated(TOKEN_BYTES * sequences * tokens) for tokens in lengths)
    positions = of_documents if sizes.masks_documents else 0
    return layout.micro_batches * (tokens + positions)


def _communicator_bytes(layout: Layout, sizes: Sizes, rank: int) -> int:
    return 0 if sizes.device == "cpu" else COMMUNICATOR_BYTES * communicators(layout, rank)


def _measuring_buffers(layout: Layout, sizes: Sizes, rank: int, pool: Pool) -> int:
    """Return the bytes of the gradients in a measuring step: whole gradients of all layers in flight, and for each
    shared unit four reduced gradients: of the layer, of the layer above, and two sums."""
    shared = [unit for position in layout.positions(rank) for unit in layout.shared_units(position)]
    uses = [unit for unit in shared if layout.pool_of(unit) == pool]
    if not layout.measures or not uses:
        return 0
    under_way = 1 if layout.order == "Layered" else len(uses)
    largest = max(sizes.whole(layout, unit) for unit in uses)
    return (under_way + _MEASURING_PARTS * len(set(uses))) * largest * sizes.master_bytes


def _arena_buffers(layout: Layout, sizes: Sizes, rank: int) -> Tiers:
    """Return the bytes of the arena that belong to no unit: shared buffers and padding for alignment. Pinned bytes
    count the whole arena."""
    arena = arena_layout(layout, sizes, rank)
    of_units = sum(piece.size for piece in arena.pieces if piece.use in ("weights", "gradient"))
    return Tiers(host=arena.size - of_units, pinned=arena.size if sizes.device == "accelerator" else 0)


def _token_buffers(layout: Layout, sizes: Sizes, rank: int) -> Tiers:
    """Return the bytes of the buffer for the tokens of a step, on their way to a GPU."""
    if sizes.device == "cpu" or not needs_tokens(layout, rank, masks_documents=sizes.masks_documents):
        return Tiers()
    shape = (sizes.max_sequences(layout), sizes.model.sequence_length)
    size = token_bytes([shape] * layout.micro_batches)
    return Tiers(host=size, pinned=size)


def _checkpoint_ring(layout: Layout, sizes: Sizes, rank: int) -> Tiers:
    crosses = sizes.device == "accelerator" and has_state_on_device(layout, rank)
    unpacks = sizes.moments == "Float8" and sizes.checkpoint_buffer > 0
    unpacked = _UNPACKED_BYTES if unpacks else 0
    return Tiers(host=sizes.checkpoint_buffer + unpacked, pinned=sizes.checkpoint_buffer if crosses else 0)


def _scaled_gradients(layout: Layout, sizes: Sizes, rank: int) -> int:
    """Return the bytes of the scratch buffers in which threads scale clipped gradients and widen rounded ones, for
    updates in host memory."""
    widens = sizes.rounds_gradients and any(layout.home(unit) != "Device" for unit in layout.local_units(rank))
    is_needed = widens or (layout.clipping != "None" and _updates_on_host(layout, sizes, rank))
    return _elements_at_a_time(sizes) * sizes.master_bytes if is_needed else 0


def threads_of_updates(threads: int, device: Device) -> int:
    """Return the number of threads that update on the host, of `threads` that torch uses for other operations. Beside
    an accelerator the threads that launch kernels keep cores of their own, but a quarter of all at most. An update
    waits for the slowest of its threads."""
    return threads if device == "cpu" else threads - min(LAUNCHING_THREADS, threads // 4)


def _updates_on_host(layout: Layout, sizes: Sizes, rank: int) -> bool:
    return any(sizes.device == "cpu" or layout.home(unit) != "Device" for unit in layout.local_units(rank))


def _rounding_on_host(layout: Layout, sizes: Sizes, rank: int) -> int:
    """Return the bytes of the scratch memory in which threads widen and round moments, for updates in host memory."""
    is_needed = sizes.rounds_moments and _updates_on_host(layout, sizes, rank)
    return sum(_rounding_buffers(sizes, _elements_at_a_time(sizes))) if is_needed else 0


def _elements_at_a_time(sizes: Sizes) -> int:
    """Return the number of elements that all threads together update at a time on the host."""
    return threads_of_updates(sizes.threads, sizes.device) * PIECE_ELEMENTS


def _rounding_on_device(layout: Layout, sizes: Sizes, rank: int) -> int:
    """Return the bytes of the same scratch memory on a GPU."""
    is_needed = sizes.rounds_moments and sizes.device == "accelerator" and has_state_on_device(layout, rank)
    return sum(map(sizes.allocated, _rounding_buffers(sizes, ROUNDED_ELEMENTS_ON_DEVICE))) if is_needed else 0


def _gradient_rounding(layout: Layout, sizes: Sizes, rank: int) -> int:
    """Return the bytes of the scratch memory on the device in which summed gradients are rounded."""
    if not sizes.rounds_gradients:
        return 0
    longest = max(sizes.shard(layout, unit) for unit in layout.local_units(rank))
    return sizes.allocated(rounded_elements(longest, sizes.device) * sizes.gradient_bytes)


def _rounding_buffers(sizes: Sizes, elements: int) -> list[int]:
    """Return the bytes of each scratch buffer: both moments, and numbers, random words and shifted words, 4 bytes each.
    With blocks, also their numbers, and a base of 4 bytes for each block."""
    blocks = [elements, 4 * blocks_of(elements)] if sizes.moments == "Float8" else []
    return [*(elements * size for size in (*[sizes.master_bytes] * MOMENTS, 4, 4, 4)), *blocks]


def _orthogonalization_on_host(layout: Layout, sizes: Sizes, rank: int) -> int:
    """Return the bytes of the scratch memory in which Muon updates a matrix in host memory: for the largest one."""
    updated = [unit for unit in layout.local_units(rank) if sizes.device == "cpu" or layout.home(unit) != "Device"]
    return _largest_scratch(sizes, updated, sizes.master_bytes)


def _orthogonalization_on_device(layout: Layout, sizes: Sizes, rank: int) -> int:
    """Return the bytes of the same scratch memory on a GPU, where the iterations compute in the compute dtype."""
    if sizes.device == "cpu":
        return 0
    updated = [unit for unit in layout.local_units(rank) if layout.home(unit) == "Device"]
    return sizes.allocated(_largest_scratch(sizes, updated, sizes.compute_bytes))


def _largest_scratch(sizes: Sizes, units: Iterable[int], width: int) -> int:
    """`width`: bytes of an element in the iterations."""
    if not sizes.uses_muon:
        return 0
    shapes = {(matrix.rows, matrix.columns) for unit in units for matrix in sizes.units[unit].hidden_matrices}
    return max((scratch_bytes(rows, columns, sizes.master_bytes, width) for rows, columns in shapes), default=0)


def _update_chunks(layout: Layout, sizes: Sizes, rank: int) -> int:
    """Return the bytes of host memory through which updates and checkpoints of units on disk pass. They do not depend
    on the number of units."""
    on_disk = [unit for unit in layout.local_units(rank) if layout.home(unit) == "Disk"]
    if not on_disk:
        return 0
    elements = min(max(sizes.shard(layout, unit) for unit in on_disk), CHUNK_ELEMENTS)
    # Master weights, moments, gradient, and the weights in the compute type.
    vectors = aligned(elements * sizes.master_bytes) + MOMENTS * aligned(sizes.moment_bytes(elements))
    vectors += aligned(elements * sizes.gradient_bytes)
    if sizes.has_own_copies:
        vectors += aligned(elements * sizes.compute_bytes)
    return CHUNKS_AT_A_TIME * vectors + PORTION_ROOM


def aligned(size: int) -> int:
    """Return `size` bytes rounded up to whole pages."""
    return -(-size // PAGE) * PAGE

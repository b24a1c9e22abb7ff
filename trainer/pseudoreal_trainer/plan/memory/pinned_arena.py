"""Layout of a rank's host arena: the memory through which state crosses the bus to and from the rank's device. Pinned
if the device is a GPU. Pure.

All state that crosses the bus shares one arena, so that one call pins it to the exact byte: torch's own allocator for
pinned memory rounds every tensor up to a power of two. Master weights and moments never cross the bus and are outside
the arena. Offloaded activations, tokens, and checkpoints of units on the device have separate memory, pinned to the
byte as well.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from pseudoreal_trainer.plan.layout import Layout, Pool
from pseudoreal_trainer.plan.sizes import Sizes

PENDING_GRADIENTS = 2
"""Maximum number of reduced gradients in bounce buffers: the gradient of the running update, and the next gradient."""
PAGE = 4096
"""Alignment in bytes for direct I/O with a disk."""
PUT_ELEMENTS = 1 << 16
"""A vector that is put into a file on a disk in parts is cut at multiples of this number of elements: whole pages in
every format, blocks of 8-bit moments included."""
LINE = 64
"""Alignment in bytes of pieces that are not used for direct I/O: a cache line."""

TOKEN_BYTES = 8
"""Bytes of a token's id."""

MicroBatchShape = tuple[int, int]
"""A micro-batch on a rank: number of sequences, and tokens per sequence."""
ArenaUse = Literal["staging", "staging of experts", "bounce", "weights", "gradient"]
"""Use of a piece of the arena.

- staging: weights of a unit on disk, on their way to the device; numbered, per pool
- bounce: a reduced gradient on its way to its update or to the disk; numbered
- weights, gradient: of the unit with this number, whose home is the host
"""
STAGING_USE: dict[Pool, ArenaUse] = {"Blocks": "staging", "Experts": "staging of experts"}


@dataclass(frozen=True)
class Piece:
    use: ArenaUse
    number: int
    size: int
    """Size in bytes."""
    alignment: int


@dataclass(frozen=True)
class ArenaLayout:
    """The pieces of the arena, in order of their addresses."""

    pieces: tuple[Piece, ...]

    @cached_property
    def ranges(self) -> dict[tuple[ArenaUse, int], range]:
        """(use, number) -> range of bytes in the arena."""
        ranges: dict[tuple[ArenaUse, int], range] = {}
        end = 0
        for piece in self.pieces:
            begin = _aligned(end, piece.alignment)
            end = begin + piece.size
            ranges[piece.use, piece.number] = range(begin, end)
        return ranges

    @property
    def size(self) -> int:
        """Bytes of the arena."""
        return max((piece.stop for piece in self.ranges.values()), default=0)

    def count(self, use: ArenaUse) -> int:
        return sum(piece.use == use for piece in self.pieces)


def arena_layout(layout: Layout, sizes: Sizes, rank: int) -> ArenaLayout:
    """Return the arena's layout on each data rank of a pipeline rank."""
    return ArenaLayout((*_shared_buffers(layout, sizes, rank), *_unit_pieces(layout, sizes, rank)))


def token_bytes(shapes: Iterable[MicroBatchShape]) -> int:
    """Return the bytes of the token ids of micro-batches, including the last targets: [B, T + 1] each."""
    return TOKEN_BYTES * sum(sequences * (tokens + 1) for sequences, tokens in shapes)


def needs_tokens(layout: Layout, rank: int, *, masks_documents: bool) -> bool:
    """Return True if a pipeline rank needs tokens: as inputs of the embedding, as targets at the head, or, on every
    rank with a block, to find documents."""
    return masks_documents or rank in (layout.rank_of(0), layout.rank_of(layout.head))


def has_state_on_device(layout: Layout, rank: int) -> bool:
    """Return True if some of the state that a pipeline rank saves is copied from the device."""
    return any(layout.home(unit) == "Device" for unit in layout.local_units(rank))


def _shared_buffers(layout: Layout, sizes: Sizes, rank: int) -> Iterator[Piece]:
    on_disk = [unit for unit in layout.local_units(rank) if layout.home(unit) == "Disk"]
    for pool, use in STAGING_USE.items():
        units = [unit for unit in on_disk if layout.pool_of(unit) == pool]
        largest = max((sizes.shard(layout, unit) for unit in units), default=0) * sizes.compute_bytes
        # One buffer per pending fetch, and one for the unit that is read ahead. Resident units are fetched one at a
        # time.
        under_way = layout.window if any(map(layout.moves, units)) else 0
        for number in range(under_way + 1) if units else ():
            yield Piece(use, number, _aligned(largest, PAGE), PAGE)
    off_device = [unit for unit in layout.local_units(rank) if layout.home(unit) != "Device"]
    bounce, kept_on_disk = ([], on_disk) if layout.keeps_gradients else (off_device, [])
    largest = max((sizes.shard(layout, unit) for unit in (*bounce, *kept_on_disk)), default=0) * sizes.gradient_bytes
    # State is put into the file through these buffers, in parts of as many elements as fit in the master type.
    put = min(max((sizes.shard(layout, unit) for unit in on_disk), default=0), PUT_ELEMENTS) * sizes.master_bytes
    # One more buffer if gradients are kept on disk: one gradient at a time is on its way to or from the disk.
    for number in range(min(PENDING_GRADIENTS, len(bounce)) + bool(kept_on_disk)):
        yield Piece("bounce", number, _aligned(max(largest, put), PAGE), PAGE)


def _unit_pieces(layout: Layout, sizes: Sizes, rank: int) -> Iterator[Piece]:
    for unit in layout.local_units(rank):
        if layout.home(unit) == "Host":
            shard = sizes.shard(layout, unit)
            yield Piece("weights", unit, shard * sizes.compute_bytes, LINE)
            if layout.keeps_gradients:
                yield Piece("gradient", unit, shard * sizes.gradient_bytes, LINE)


def _aligned(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment

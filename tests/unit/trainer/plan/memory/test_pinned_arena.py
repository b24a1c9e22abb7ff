"""Layout of the pinned host arena, counted by hand for a model of 6.5 billion parameters."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from pseudoreal_api.spec.phase import Home, Sharing
from pseudoreal_trainer.plan.layout import Layout
from pseudoreal_trainer.plan.memory.pinned_arena import LINE, PAGE, PENDING_GRADIENTS, arena_layout
from pseudoreal_trainer.plan.memory.tiers import resident_bytes
from pseudoreal_trainer.plan.units import units_of

from tests.unit.trainer.plan.memory.support.large_model import LAYERS, MODEL, PARAMETERS, SIZES, TOKENS, layout

BLOCK = 4 * 4096 * 4096 + 3 * 4096 * 11008 + 2 * 4096
SCALED = 4 * 2**19
"""Bytes of the buffer in which one thread scales gradients."""


def test_large_model_has_its_documented_size() -> None:
    assert SIZES.units[1].numel == BLOCK
    assert 6.4e9 < PARAMETERS < 6.6e9


def test_with_global_clipping_copies_and_gradients_are_pinned_to_the_byte() -> None:
    """Nothing else is pinned: of 18 bytes per parameter, 12 are master weights and moments."""
    tiers = resident_bytes(layout("Host"), SIZES, 0)
    assert arena_layout(layout("Host"), SIZES, 0).size == (2 + 4) * PARAMETERS
    assert tiers.pinned == (2 + 4) * PARAMETERS + TOKENS
    assert tiers.host == 18 * PARAMETERS + TOKENS + SCALED


@pytest.mark.parametrize("clipping", ["PerUnit", "None"])
def test_gradients_updated_at_once_share_two_bounce_buffers(clipping: Any) -> None:
    tiers = resident_bytes(layout("Host", clipping=clipping), SIZES, 0)
    assert tiers.pinned == 2 * PARAMETERS + PENDING_GRADIENTS * 4 * BLOCK + TOKENS
    scaled = SCALED if clipping == "PerUnit" else 0
    assert tiers.host == 14 * PARAMETERS + PENDING_GRADIENTS * 4 * BLOCK + TOKENS + scaled
    saved = resident_bytes(layout("Host"), SIZES, 0).host - tiers.host
    assert saved > 22 * 2**30


@pytest.mark.parametrize("clipping", ["Global", "PerUnit"])
def test_units_on_disk_share_a_few_staging_buffers(clipping: Any) -> None:
    window = 2
    region = arena_layout(layout("Disk", clipping=clipping, window=window), SIZES, 0)
    rooms = PENDING_GRADIENTS if clipping == "PerUnit" else 1
    assert region.size == (window + 1) * 2 * BLOCK + rooms * 4 * BLOCK


def test_a_block_of_two_pipeline_ranks_crosses_the_bus_in_halves() -> None:
    """With home Disk, units whose copies stay on the device are read one at a time, so one staging buffer suffices;
    streamed units need window + 1."""
    small = replace(SIZES, units=units_of(MODEL.model_copy(update={"layers": 3}), Sharing(blocks=3)))
    for home, use in (("Host", "weights"), ("Disk", "staging")):
        homes: Any = ("Device", home, "Device", "Device", "Device")
        common = Layout((0, 1, 0, 2), 2, 1, 4, order="GPipe", homes=homes, clipping="PerUnit")
        pieces = arena_layout(common, small, 0).pieces
        assert [piece.size for piece in pieces if piece.use == use] == [2 * BLOCK // 2]
        assert [piece.use for piece in pieces if piece.use != use] == ["bounce"]
    moving: Any = ("Device", "Disk", "Disk", "Device", "Device")
    assert arena_layout(replace(common, homes=moving), small, 0).count("staging") == common.window + 1


def test_nothing_is_pinned_without_a_gpu_and_nothing_of_units_on_it() -> None:
    assert resident_bytes(layout("Host"), replace(SIZES, device="cpu"), 0).pinned == 0
    assert resident_bytes(layout("Device"), SIZES, 0).pinned == TOKENS
    assert arena_layout(layout("Device"), SIZES, 0).size == 0


def test_tokens_cross_the_bus_to_the_ends_of_a_pipeline_only() -> None:
    """A data rank has a part of each micro-batch; the largest part counts."""
    ranks = [resident_bytes(Layout(tuple(range(LAYERS)), 4, 3, 2), SIZES, rank) for rank in range(4)]
    assert [tiers.pinned for tiers in ranks] == [8 * 2 * 2 * (2048 + 1), 0, 0, 8 * 2 * 2 * (2048 + 1)]


def test_where_documents_are_masked_tokens_cross_the_bus_to_all_ranks() -> None:
    ranks = [
        resident_bytes(Layout(tuple(range(LAYERS)), 4, 3, 2), replace(SIZES, masks_documents=True), r) for r in range(4)
    ]
    assert [tiers.pinned for tiers in ranks] == [8 * 2 * 2 * (2048 + 1)] * 4


def test_a_checkpoint_is_pinned_where_it_takes_units_from_the_device() -> None:
    """Each pipeline rank that uses a cross-stage unit saves a shard of the unit."""
    saving = replace(SIZES, checkpoint_buffer=1000)
    assert resident_bytes(layout("Device"), saving, 0).pinned == 1000 + TOKENS
    assert resident_bytes(layout("Host"), saving, 0).pinned == resident_bytes(layout("Host"), SIZES, 0).pinned
    assert resident_bytes(layout("Host"), saving, 0).host == resident_bytes(layout("Host"), SIZES, 0).host + 1000
    homes: tuple[Home, ...] = ("Host", "Host", "Device", "Host")
    tied = Layout((0, 1) * 2, 2, 1, 1, order="GPipe", homes=homes)
    assert tied.users[2] == (0, 1)
    saving = replace(saving, units=units_of(MODEL, Sharing(blocks=2)))
    found = [
        resident_bytes(tied, replace(saving, checkpoint_buffer=size), rank).pinned
        for rank in (0, 1)
        for size in (0, 1000)
    ]
    assert [found[1] - found[0], found[3] - found[2]] == [1000, 1000]
    alone = replace(tied, homes=("Host", "Device", "Host", "Host"), layer_blocks=(0, 0, 1, 1))
    without = replace(saving, checkpoint_buffer=0)
    more = [resident_bytes(alone, saving, r).pinned - resident_bytes(alone, without, r).pinned for r in (0, 1)]
    assert more == [1000, 0]


@pytest.mark.parametrize("clipping", ["Global", "None"])
@pytest.mark.parametrize("shards", [1, 3])
def test_arena_pieces_are_consecutive_and_aligned(clipping: Any, shards: int) -> None:
    homes: Any = ("Host", "Disk") * (LAYERS // 2 + 1)
    mixed = Layout(
        tuple(range(LAYERS)), 1, shards, 4, homes=homes, clipping=clipping, sharding="Full" if shards > 1 else "None"
    )
    region = arena_layout(mixed, SIZES, 0)
    ranges = sorted(region.ranges.values(), key=lambda found: found.start)
    assert len(ranges) == len(region.pieces), "no piece has the name of another one"
    assert all(0 <= after.start - before.stop < PAGE for before, after in pairwise(ranges))
    for piece in region.pieces:
        found = region.ranges[piece.use, piece.number]
        assert len(found) == piece.size
        assert found.start % piece.alignment == 0
        assert piece.alignment == (PAGE if piece.use in ("staging", "bounce") else LINE)

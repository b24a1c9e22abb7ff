"""Which rank writes which part of which tensor. Pure.

Ranks hold ranges of a unit's flat vector, wherever these cut its tensors. What all data ranks hold is written by each
of them in part, so that all of them write about as much.
"""

from collections.abc import Sequence

from pseudoreal_trainer.checkpoint.manifest import Piece, StoredTensor
from pseudoreal_trainer.plan.layout import Layout
from pseudoreal_trainer.plan.parts import parts_of, units_of_rank
from pseudoreal_trainer.plan.units import Unit

Spans = dict[int, range]
"""Unit -> range of its flat vector."""


def spans_of(layout: Layout, units: Sequence[Unit], world_rank: int) -> Spans:
    """The ranges that a rank writes. `units`: as the rank has them."""
    pipeline_rank = layout.mesh.coordinates(world_rank).pipeline
    mine = [index for index in range(len(units)) if layout.users[index][0] == pipeline_rank]
    found = {index: _span(units[index], layout.part(index, world_rank), layout.holders(index)) for index in mine}
    return {index: span for index, span in found.items() if span}


def tensors_of(layout: Layout, units: Sequence[Unit], dtype: str) -> dict[str, StoredTensor]:
    """Tensor -> its pieces, as the manifest lists them; the files have the numbers of the ranks. `units`: whole."""
    shapes = {parameter.name: parameter.whole for unit in units for parameter in unit.parameters}
    pieces: dict[str, list[Piece]] = {name: [] for name in shapes}
    for rank in range(layout.mesh.ranks):
        own = units_of_rank(layout, units, rank)
        for index, span in spans_of(layout, own, rank).items():
            for part in parts_of(own[index], span):
                pieces[part.name].append(Piece(file=rank, begin=part.begin, end=part.end))
    # Ranks that hold the same experts need not be neighbours.
    in_order = {name: sorted(found, key=lambda piece: piece.begin) for name, found in pieces.items()}
    return {name: StoredTensor(shape=shape, dtype=dtype, pieces=in_order[name]) for name, shape in shapes.items()}


def _span(unit: Unit, part: int, parts: int) -> range:
    shard = unit.shard(part, parts)
    return range(min(shard.start, unit.numel), min(shard.stop, unit.numel))

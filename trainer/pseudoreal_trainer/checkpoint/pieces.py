"""Which rank writes which part of which tensor. Pure.

Ranks hold ranges of a unit's flat vector, wherever these cut its tensors. What all data ranks hold is written by each
of them in part, so that all of them write about as much.
"""

from collections.abc import Sequence

from pseudoreal_trainer.checkpoint.manifest import Piece, StoredTensor
from pseudoreal_trainer.plan.layout import Layout
from pseudoreal_trainer.plan.parts import parts_of
from pseudoreal_trainer.plan.units import Unit

Spans = dict[int, range]
"""Unit -> range of its flat vector."""


def spans_of(layout: Layout, units: Sequence[Unit], world_rank: int) -> Spans:
    """The ranges that a rank writes."""
    pipeline_rank, part = layout.mesh.coordinates(world_rank).pipeline, layout.mesh.part(world_rank)
    mine = [index for index in range(len(units)) if layout.users[index][0] == pipeline_rank]
    found = {index: _span(layout, units[index], part) for index in mine}
    return {index: span for index, span in found.items() if span}


def tensors_of(layout: Layout, units: Sequence[Unit], dtype: str) -> dict[str, StoredTensor]:
    """Tensor -> its pieces, as the manifest lists them; the files have the numbers of the ranks."""
    shapes = {parameter.name: parameter.shape for unit in units for parameter in unit.parameters}
    pieces: dict[str, list[Piece]] = {name: [] for name in shapes}
    for rank in range(layout.mesh.ranks):
        for index, span in spans_of(layout, units, rank).items():
            for part in parts_of(units[index], span):
                pieces[part.name].append(Piece(file=rank, begin=part.begin, end=part.end))
    return {name: StoredTensor(shape=shape, dtype=dtype, pieces=pieces[name]) for name, shape in shapes.items()}


def _span(layout: Layout, unit: Unit, part: int) -> range:
    shard = unit.shard(part, layout.data)
    return range(min(shard.start, unit.numel), min(shard.stop, unit.numel))

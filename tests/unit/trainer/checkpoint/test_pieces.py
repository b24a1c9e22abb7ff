"""Assignment of elements to the ranks that write them: the fast computation for many units, compared with each rank's
own."""

from collections import Counter
from math import prod
from typing import Any

import pytest
from pseudoreal_api.resolved.layers import blocks_of_layers, experts_of_layers
from pseudoreal_api.spec.model import Attention, FeedForward, MixtureOfExperts, Model, TopK
from pseudoreal_api.spec.phase import Sharing
from pseudoreal_trainer.checkpoint import pieces
from pseudoreal_trainer.checkpoint.manifest import Piece
from pseudoreal_trainer.checkpoint.pieces import spans_of, tensors_of
from pseudoreal_trainer.plan.layout import Layout
from pseudoreal_trainer.plan.parts import Part, parts_of, units_of_rank
from pseudoreal_trainer.plan.units import Unit, units_of


def _model(layers: int, experts: int | None, embeddings: str) -> Model:
    mixture = MixtureOfExperts(type="TopK", count=experts, top_k=TopK(per_token=2, size=8)) if experts else None
    return Model(
        layers=layers,
        hidden_size=16,
        attention=Attention(heads=2),
        sequence_length=8,
        vocabulary_size=50,
        feed_forward=FeedForward(size=20),
        experts=mixture,
        embeddings=embeddings,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    "case",
    [
        {"data": 1},
        {"data": 5},
        {"data": 4, "pipeline": 2},
        {"data": 4, "pipeline": 2, "sharding": "None"},
        {"data": 4, "pipeline": 2, "blocks": 2},
        {"data": 4, "pipeline": 4, "embeddings": "Tied"},
        {"data": 8, "pipeline": 2, "blocks": 4, "replicas": 2},
        {"data": 8, "pipeline": 2, "experts": 8, "expert_ranks": 4},
        {"data": 8, "experts": 8, "expert_ranks": 2, "expert_groups": 2},
        {"data": 8, "pipeline": 2, "experts": 8, "expert_ranks": 2, "expert_groups": 2, "replicas": 2},
        {"data": 8, "pipeline": 2, "experts": 8, "expert_ranks": 8, "blocks": 3},
    ],
    ids=str,
)
def test_pieces_are_those_of_the_ranks_one_by_one(case: dict[str, Any]) -> None:
    kept: dict[str, Any] = {"pipeline": 1, "micro_batches": 8, "sharding": "Full"}
    kept |= {key: value for key, value in case.items() if key not in ("experts", "embeddings", "blocks")}
    model = _model(6 if "experts" in case else 8, case.get("experts"), case.get("embeddings", "Separate"))
    sharing = Sharing(blocks=case.get("blocks", model.layers))
    layout = Layout(
        layer_blocks=blocks_of_layers(sharing, model.layers),
        layer_experts=experts_of_layers(sharing, model) if model.experts else (),
        ends_are_one=model.embeddings == "Tied",
        **kept,
    )
    units = units_of(model, sharing)
    expected: dict[str, list[Piece]] = {p.name: [] for unit in units for p in unit.parameters}
    for rank in range(layout.mesh.ranks):
        own = units_of_rank(layout, units, rank)
        for index, span in spans_of(layout, own, rank).items():
            for part in parts_of(own[index], span):
                expected[part.name].append(Piece(file=rank, begin=part.begin, end=part.end))
    found = tensors_of(layout, units, "float32")
    assert [*found] == [*expected]
    for name, tensor in found.items():
        assert tensor.pieces == sorted(expected[name], key=lambda piece: piece.begin), name


def test_blocks_that_are_cut_alike_are_cut_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise each rank would be computed for each block, at every save."""
    model, sharing, calls = _model(40, None, "Separate"), Sharing(blocks=40), Counter[str]()

    def counted(unit: Unit, span: range) -> list[Part]:
        calls[unit.name] += 1
        return parts_of(unit, span)

    monkeypatch.setattr(pieces, "parts_of", counted)
    layout = Layout(layer_blocks=blocks_of_layers(sharing, 40), pipeline=1, data=64, micro_batches=1, sharding="Full")
    tensors_of(layout, units_of(model, sharing), "float32")
    assert calls == {"embedding": 64, "blocks.0": 64, "head": 64}


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("sharding", ["None", "Full"])
def test_pieces_of_slices_cover_each_tensor_once(ranks: int, sharding: Any) -> None:
    """With two key heads, four ranks have all keys and values; the first of them is named."""
    model = _model(4, None, "Separate")
    attention = model.attention.model_copy(update={"heads": 4, "key_value_heads": 2})
    model = model.model_copy(update={"attention": attention})
    layout = Layout(tuple(range(4)), 1, 8, 1, tensor_ranks=ranks, sharding=sharding, vocabulary=model.vocabulary_size)
    units = units_of(model, Sharing(blocks=4))
    found = tensors_of(layout, units, "float32")
    held: dict[int, dict[str, list[tuple[int, int]]]] = {}
    for rank in range(layout.mesh.ranks):
        own = units_of_rank(layout, units, rank)
        for index, span in spans_of(layout, own, rank).items():
            for part in parts_of(own[index], span):
                held.setdefault(rank, {}).setdefault(part.name, []).append((part.begin, part.end))
    for name, tensor in found.items():
        ends = [0, *(piece.end for piece in tensor.pieces)]
        assert [piece.begin for piece in tensor.pieces] == ends[:-1], name
        assert ends[-1] == prod(tensor.shape), name
        assert all((one.begin, one.end) in held[one.file][name] for one in tensor.pieces), name
        is_read_by_all = name.endswith((".output.weight", ".down.weight"))
        assert tensor.column_slices == (ranks if is_read_by_all else 1), name

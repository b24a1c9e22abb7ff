"""Parameters of models, counted as in their papers."""

from collections import Counter
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pseudoreal_api.spec.model import Model
from pseudoreal_api.spec.optimizer import Optimizer
from pseudoreal_api.spec.phase import Sharing
from pseudoreal_trainer.model.reference import Transformer
from pseudoreal_trainer.plan.parts import by_expert, parts_of
from pseudoreal_trainer.plan.units import Unit, are_experts, block_of, in_block, unit_of, units_of
from pseudoreal_trainer.plan.update_ranges import update_ranges

SMALL = {"layers": 2, "hiddenSize": 8, "attention": {"heads": 2}, "sequenceLength": 4, "feedForward": {"size": 12}}
M6_10T = {
    "layers": 48,
    "hiddenSize": 1024,
    "attention": {"heads": 16},
    "sequenceLength": 512,
    "feedForward": {"size": 9984},
}
MIXTURES = [None, {"count": 4}, {"count": 6, "prototypes": 3}]


def model(body: dict[str, Any], **changes: Any) -> Model:
    return Model.model_validate(body | changes)


def test_ten_trillion_parameters() -> None:
    """M6-10T (arXiv 2110.03888): 48 layers of 10,240 experts, which share one block in the pseudo phase."""
    spec = model(M6_10T, experts={"count": 10240, "prototypes": 80})
    _, block, experts, _ = units_of(spec, Sharing(blocks=1))
    assert experts.numel == 10240 * 2 * 1024 * 9984
    assert block.numel == 10240 * 1024 + 4 * 1024**2 + 2 * 1024
    assert 48 * (block.numel + experts.numel) == pytest.approx(10.05e12, rel=1e-3)


@pytest.mark.parametrize("embeddings", ["Separate", "Tied"])
@pytest.mark.parametrize("activation", ["GELU", "SwiGLU"])
@pytest.mark.parametrize("experts", MIXTURES, ids=str)
def test_units_have_the_parameters_of_the_model(
    experts: dict[str, Any] | None, activation: str, embeddings: str
) -> None:
    feed_forward = {"size": 12, "activation": activation}
    spec = model(SMALL, experts=experts, feedForward=feed_forward, embeddings=embeddings, vocabularySize=300)
    units = units_of(spec, Sharing(blocks=2))
    ours = {p.name: p.shape for unit in units for p in unit.parameters}
    theirs = {name: tuple(value.shape) for name, value in Transformer(spec, Sharing(blocks=2)).state_dict().items()}
    assert ours == theirs
    assert all(unit_of(p.name, spec) == unit.name for unit in units for p in unit.parameters)


OPTIONS: list[dict[str, Any]] = [
    {"attention": {"heads": 4, "keyValueHeads": 2, "headSize": 6}},
    {"attention": {"heads": 2, "bias": "QueryKeyValue", "queryKeyNorm": "PerHead"}, "norm": {"placement": "Both"}},
    {"attention": {"heads": 2, "bias": "All", "queryKeyNorm": "AllHeads"}, "norm": {"placement": "Post"}},
    {"feedForward": {"size": 12, "bias": "All"}, "experts": {"count": 2}},
    {"experts": {"type": "TopK", "count": 3, "topK": {"perToken": 1, "biasUpdateRate": "0.1", "sharedExperts": 1}}},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_units_have_the_parameters_of_the_models_options(options: dict[str, Any]) -> None:
    spec = model(SMALL, **options)
    ours = {p.name: p.shape for unit in units_of(spec, Sharing(blocks=2)) for p in unit.parameters}
    theirs = {name: tuple(value.shape) for name, value in Transformer(spec, Sharing(blocks=2)).state_dict().items()}
    assert ours == theirs


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_biases_and_norms_do_not_decay(options: dict[str, Any]) -> None:
    """Tensors without decay have one dimension in a plain model, and one more if stacked."""
    for unit in units_of(model(SMALL, **options), Sharing(blocks=2)):
        decays = [len(one.shape) > (2 if unit.is_experts else 1) for one in unit.parameters]
        assert decays == sorted(decays, reverse=True)
        expected = sum(p.numel for p, is_decayed in zip(unit.parameters, decays, strict=True) if is_decayed)
        assert _decayed(unit) == expected


@pytest.mark.parametrize("experts", MIXTURES, ids=str)
def test_matrices_come_first(experts: dict[str, Any] | None) -> None:
    block = units_of(model(SMALL, experts=experts), Sharing(blocks=2))[2]
    ranks = [len(parameter.shape) for parameter in block.parameters]
    assert ranks == sorted(ranks, reverse=True)
    assert block.numel - _decayed(block) == Counter(ranks)[1] * 8 == 2 * 8


def _decayed(unit: Unit) -> int:
    """Return the number of elements with decay, at the start of the vector."""
    ranges = [one for one in update_ranges(unit, Optimizer()) if one.decay]
    assert all(one.begin == 0 for one in ranges)
    return sum(one.end for one in ranges)


BALANCED = {"type": "TopK", "topK": {"perToken": 1, "biasUpdateRate": "0.001"}}


@given(st.integers(1, 40), st.integers(1, 3), st.integers(1, 70))
def test_no_shard_cuts_the_bias_that_balances_experts(count: int, hidden: int, ranks: int) -> None:
    sizes = {"hiddenSize": 2 * hidden, "attention": {"heads": 1}, "feedForward": {"size": 3}}
    unit = units_of(model(SMALL, experts=BALANCED | {"count": count}, **sizes), Sharing(blocks=1))[1]
    assert unit.parameters[-1].name == "blocks.0.experts.balancing_bias"
    shards = [unit.shard(rank, ranks) for rank in range(ranks)]
    assert [index for shard in shards for index in shard][: unit.numel] == list(range(unit.numel))
    assert all(len(shard) % 16 == 0 or ranks == 1 for shard in shards)
    bias = range(unit.numel - count, unit.numel)
    assert sum(bias.start in shard and bias.stop - 1 in shard for shard in shards) == 1


def test_a_bias_that_balances_experts_costs_large_shards_nothing() -> None:
    large = {"hiddenSize": 512, "attention": {"heads": 8}, "feedForward": {"size": 333}}
    unit = units_of(model(SMALL, experts=BALANCED | {"count": 64}, **large), Sharing(blocks=1))[1]
    assert unit.shard_length(64) == -(-unit.numel // (64 * 16)) * 16


def test_an_expert_has_its_place_in_every_block() -> None:
    assert block_of("blocks.3.experts.up.weight") == 3
    assert in_block("blocks.3.experts.up.weight", 7) == "blocks.7.experts.up.weight"


@pytest.mark.parametrize("feed_forward", [{"size": 3}, {"size": 3, "activation": "SwiGLU"}, {"size": 3, "bias": "All"}])
def test_a_range_of_experts_is_a_range_of_each_stacked_tensor(feed_forward: dict[str, Any]) -> None:
    """The oracle is numpy: a unit's parts of tensors, one after the other, are the rows of its experts."""
    sizes = {"hiddenSize": 4, "attention": {"heads": 1}, "feedForward": feed_forward}
    whole = units_of(model(SMALL, experts={"count": 12}, **sizes), Sharing(blocks=1))[2]
    tensors = {p.name: np.random.default_rng(len(p.name)).random(p.whole) for p in whole.parameters}
    assert {values.shape[0] for values in tensors.values()} == {12}
    for own in (range(12), range(5), range(4, 9), range(11, 12)):
        unit = whole.of_experts(own)
        expected = np.concatenate([tensors[p.name][own.start : own.stop].ravel() for p in unit.parameters])
        assert unit.numel == len(expected) == len(own) * whole.numel // 12
        assert unit.experts == own
        for cuts in ([0, unit.numel], [0, 1, 7, unit.numel // 2, unit.numel]):
            spans = [range(*pair) for pair in pairwise(cuts)]
            found = [part for span in spans for part in parts_of(unit, span)]
            read = [tensors[part.name].ravel()[part.begin : part.end] for part in found]
            assert np.array_equal(np.concatenate(read), expected)
            assert [part.offset for part in found] == [*accumulate((len(each) for each in read[:-1]), initial=0)]
            assert all(part.shape == tensors[part.name].shape for part in found)


def test_each_rank_holds_its_range_of_neighbouring_experts() -> None:
    whole = units_of(model(SMALL, experts={"count": 12}), Sharing(blocks=1))[2]
    assert [whole.of_rank(rank, 3).experts for rank in range(3)] == [range(4), range(4, 8), range(8, 12)]
    some = whole.of_experts(range(4, 8))
    assert [some.of_rank(rank, 2).experts for rank in range(2)] == [range(4, 6), range(6, 8)]
    assert some.of_rank(0, 1) is some
    block = units_of(model(SMALL, experts={"count": 12}), Sharing(blocks=1))[1]
    assert block.experts is None
    assert block.of_rank(1, 3) is block


def test_names_tell_experts_from_the_bias_that_balances_them() -> None:
    """The name of a group of experts may have a suffix after the name of the experts."""
    assert all(map(are_experts, ("blocks.3.experts", "blocks.3.experts.up.weight", "blocks.3.experts.16-31")))
    assert not any(map(are_experts, ("blocks.3", "blocks.3.router.weight", "blocks.3.experts.balancing_bias", "head")))


def test_elements_are_cut_where_experts_begin() -> None:
    assert [*by_expert(5, 13, 4)] == [(1, range(5, 8)), (2, range(8, 12)), (3, range(12, 13))]
    assert [*by_expert(4, 8, 4)] == [(1, range(4, 8))]
    assert [*by_expert(3, 3, 4)] == []

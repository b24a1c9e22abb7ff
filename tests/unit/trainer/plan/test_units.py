"""Parameters of a model, counted as the papers do."""

from collections import Counter
from typing import Any

import pytest
from pseudoreal_api.spec.model import Model
from pseudoreal_api.spec.phase import Sharing
from pseudoreal_trainer.model.transformer import Transformer
from pseudoreal_trainer.plan.units import block_of, in_block, unit_of, units_of

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
    shared = units_of(spec, Sharing(blocks=1))[1]
    experts = 10240 * 2 * 1024 * 9984
    assert shared.numel == experts + 10240 * 1024 + 4 * 1024**2 + 2 * 1024
    assert 48 * shared.numel == pytest.approx(10.05e12, rel=1e-3)


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
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_units_have_the_parameters_of_the_models_options(options: dict[str, Any]) -> None:
    spec = model(SMALL, **options)
    ours = {p.name: p.shape for unit in units_of(spec, Sharing(blocks=2)) for p in unit.parameters}
    theirs = {name: tuple(value.shape) for name, value in Transformer(spec, Sharing(blocks=2)).state_dict().items()}
    assert ours == theirs


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_biases_and_norms_do_not_decay(options: dict[str, Any]) -> None:
    """In a plain model what does not decay has one dimension."""
    for unit in units_of(model(SMALL, **options), Sharing(blocks=2)):
        decays = [len(parameter.shape) > 1 for parameter in unit.parameters]
        assert decays == sorted(decays, reverse=True)
        assert unit.decayed == sum(p.numel for p, is_decayed in zip(unit.parameters, decays, strict=True) if is_decayed)


@pytest.mark.parametrize("experts", MIXTURES, ids=str)
def test_matrices_come_first(experts: dict[str, Any] | None) -> None:
    block = units_of(model(SMALL, experts=experts), Sharing(blocks=2))[2]
    ranks = [len(parameter.shape) for parameter in block.parameters]
    assert ranks == sorted(ranks, reverse=True)
    assert block.numel - block.decayed == Counter(ranks)[1] * 8 == 2 * 8


def test_an_expert_has_its_place_in_every_block() -> None:
    assert block_of("blocks.3.experts.12.up.weight") == 3
    assert in_block("blocks.3.experts.12.up.weight", 7) == "blocks.7.experts.12.up.weight"

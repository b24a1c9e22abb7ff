"""Standard deviations of initial weights, by scheme and by the role of a matrix."""

from typing import Any

import pytest
import torch
from pseudoreal_api.spec.model import Model
from pseudoreal_api.spec.phase import Sharing
from pseudoreal_trainer.model.initialization import initial_weights
from pseudoreal_trainer.plan.units import units_of

HIDDEN, INNER, LAYERS = 64, 256, 8
DEEP = 4.0
"""Square root of two per layer."""
SWIGLU = {"size": INNER, "activation": "SwiGLU"}

PARTS = {
    "embedding": "embedding.weight",
    "head": "head.weight",
    "query": "blocks.0.attention.query.weight",
    "output": "blocks.0.attention.output.weight",
    "gate": "blocks.0.ffn.gate.weight",
    "up": "blocks.0.ffn.up.weight",
    "down": "blocks.0.ffn.down.weight",
}
EXPECTED = {
    "FanIn": [1, 1 / 8, 1 / 8, 1 / 8 / DEEP, 1 / 8, 1 / 8, 1 / 16 / DEEP],
    "HuggingFace": [0.02] * 7,
    "Megatron": [0.02, 0.02, 0.02, 0.02 / DEEP, 0.02, 0.02, 0.02 / DEEP],
    "OLMo2": [0.02] * 7,
    "TorchTitan": [1, 1 / 8, 0.02, 0.02 / DEEP, 0.02, 0.02 / DEEP, 0.02 / DEEP],
}
"""Standard deviations in the order of PARTS."""
_CUT = 0.98658
"""Standard deviation of a standard normal distribution truncated at 3."""


def _weights(scheme: str, **changes: Any) -> dict[str, torch.Tensor]:
    model = {"layers": LAYERS, "hiddenSize": HIDDEN, "attention": {"heads": 4}, "sequenceLength": 8}
    spec = Model.model_validate(
        model | {"feedForward": SWIGLU, "vocabularySize": 2000, "initialWeights": scheme} | changes
    )
    found: dict[str, torch.Tensor] = {}
    for index, unit in enumerate(units_of(spec, Sharing(blocks=1))):
        found |= initial_weights(unit, index, spec, 3, torch.float64)
    return found


@pytest.mark.parametrize("scheme", EXPECTED)
def test_matrices_are_spread_as_their_scheme_says(scheme: str) -> None:
    weights = _weights(scheme)
    for (part, name), expected in zip(PARTS.items(), EXPECTED[scheme], strict=True):
        values = weights[name]
        is_cut = scheme == "OLMo2" or (scheme, part) == ("TorchTitan", "head")
        # Four standard errors.
        tolerance = 4 / (2 * values.numel()) ** 0.5
        assert float(values.std()) == pytest.approx(expected * (_CUT if is_cut else 1), rel=tolerance), name
        assert abs(float(values.mean())) < 4 * expected / values.numel() ** 0.5, name
        assert (float(values.abs().max()) <= 3 * expected) == is_cut, name
    assert all((weights[name] == 1).all() for name in weights if "norm" in name)


@pytest.mark.parametrize("scheme", EXPECTED)
def test_one_matrix_for_both_ends_begins_as_a_head(scheme: str) -> None:
    tied = _weights(scheme, embeddings="Tied")
    assert "head.weight" not in tied
    expected = EXPECTED[scheme][1]
    assert float(tied["embedding.weight"].std()) == pytest.approx(expected, rel=0.03)


def test_without_a_gate_up_is_not_divided() -> None:
    weights = _weights("TorchTitan", feedForward={"size": INNER})
    assert float(weights["blocks.0.ffn.up.weight"].std()) == pytest.approx(0.02, rel=0.03)


def test_routers_are_as_other_matrices() -> None:
    experts = {"count": 64}
    spread = {scheme: float(_weights(scheme, experts=experts)["blocks.0.router.weight"].std()) for scheme in EXPECTED}
    assert spread == {
        scheme: pytest.approx({"FanIn": 1 / 8, "OLMo2": 0.02 * _CUT}.get(scheme, 0.02), rel=0.06) for scheme in EXPECTED
    }

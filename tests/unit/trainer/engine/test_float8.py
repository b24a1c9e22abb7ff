"""Training with products in float8, against a plain loop with the rounding of tests/support/float8.py, to 1e-12."""

import json
from typing import Any, get_args

import pytest
from pseudoreal_api.spec.optimizer import ProductFormat

from tests.unit.trainer.engine.support import reference
from tests.unit.trainer.engine.support.agreement import assert_trained_alike
from tests.unit.trainer.engine.support.cases import EIGHT_IN_BALANCE, Case, each
from tests.unit.trainer.engine.support.running import Result, sound, want

LONG = json.dumps({"sequenceLength": 8})
WIDE: dict[str, Any] = {"hiddenSize": 40, "feedForward": {"size": 72}}
"""Fields of a model whose rows have several blocks of 32 numbers, the last one shorter."""
CASES = [
    *each(products="Float8", keep=["Inputs", "Products", "All"], homes=["d", "hD"], activation=["GELU", "SwiGLU"]),
    *each(products="Float8", options=["all biases and norms", "Llama3", "Qwen3MoE"], clipping="Global", homes="h"),
    *each(products="Float8", data=2, sharding=["None", "Full"], micro_batches=[1, 4], clipping="PerUnit"),
    *each(products="Float8", pipeline=2, order=["Layered", "1F1B"], micro_batches=4, blocks=[None, 1]),
    Case(products="Float8", data=2, expert_ranks=2, drawn=EIGHT_IN_BALANCE, clipping="Global"),
    Case(products="Float8", data=2, context_ranks=2, drawn=LONG, documents=True),
    *each(
        products="MXFP8", drawn=json.dumps(WIDE), homes=["d", "hD"], activation=["GELU", "SwiGLU"], clipping="Global"
    ),
    *each(products="MXFP8", drawn=json.dumps(WIDE), data=2, sharding="Full", micro_batches=[1, 4], keep="Products"),
    Case(products="MXFP8", drawn=json.dumps(WIDE), pipeline=2, order="1F1B", micro_batches=4),
    Case(products="MXFP8", drawn=json.dumps(json.loads(EIGHT_IN_BALANCE) | WIDE), data=2, expert_ranks=2),
    Case(products="MXFP8", drawn=json.dumps(WIDE | {"sequenceLength": 8}), data=2, context_ranks=2, documents=True),
]
want(CASES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_training_in_float8_equals_the_reference(case: Case, engine_results: dict[Case, list[Result]]) -> None:
    assert_trained_alike(sound(engine_results, case), case)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_evaluation_in_float8_equals_the_reference(case: Case, engine_results: dict[Case, list[Result]]) -> None:
    expected = reference.evaluate(case, sound(engine_results, case).weights)
    assert sum(result.evaluation for result in engine_results[case]) == pytest.approx(expected, rel=1e-12)


def test_the_rounding_changes_the_losses() -> None:
    plain, *rounded = (
        reference.train(Case(products=products, drawn=json.dumps(WIDE)))[0] for products in get_args(ProductFormat)
    )
    for losses in rounded:
        assert plain != pytest.approx(losses, rel=1e-10)
        assert plain == pytest.approx(losses, rel=0.05)
    assert rounded[0] != pytest.approx(rounded[1], rel=1e-10)

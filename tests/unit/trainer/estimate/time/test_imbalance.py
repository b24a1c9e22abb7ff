"""Bounds of the load imbalance of experts over ranks, computed by hand."""

from dataclasses import replace
from typing import Any

import pytest
from pseudoreal_trainer.estimate.time.predict import max_imbalance, predict, seconds_at_max_imbalance
from pseudoreal_trainer.plan.layout import Layout
from pseudoreal_trainer.plan.lower import step_plan
from pseudoreal_trainer.plan.sizes import Sizes

from tests.unit.trainer.estimate.time.support.profiles import profile
from tests.unit.trainer.plan.support.cases import make_layout, make_sizes


def _prototypes(count: int, prototypes: int, factor: str) -> Sizes:
    """Return sizes with sequences of 16 tokens."""
    return make_sizes(1, experts={"count": count, "prototypes": prototypes, "capacityFactor": factor})


def _top_k(count: int, per_token: int) -> Sizes:
    return make_sizes(1, experts={"type": "TopK", "count": count, "topK": {"perToken": per_token}})


@pytest.mark.parametrize(
    ("count", "prototypes", "factor", "expert_ranks", "expected"),
    [
        # A rank's two experts (of a prototype's four) accept 6 tokens of a sequence each; on average a rank has 8 rows.
        pytest.param(8, 2, "1.5", 4, 12 / 8, id="up to the capacity factor"),
        pytest.param(8, 2, "4", 4, 16 / 8, id="never full: all tokens of a prototype"),
        pytest.param(8, 2, "1.5", 2, 1.0, id="whole prototypes"),
        # The first rank holds both experts of one prototype and one expert of the next, which accepts 10 tokens.
        pytest.param(6, 3, "1.25", 2, (16 + 10) / 24, id="a prototype on two ranks"),
        pytest.param(8, 2, "0.5", 4, 1.0, id="full before the mean"),
        pytest.param(8, 1, "1.25", 1, 1.0, id="not spread"),
    ],
)
def test_max_imbalance_of_prototypes(
    count: int, prototypes: int, factor: str, expert_ranks: int, expected: float
) -> None:
    assert max_imbalance(_prototypes(count, prototypes, factor), expert_ranks) == pytest.approx(expected, rel=1e-15)


def test_capacity_per_document_does_not_bound_the_imbalance() -> None:
    masked = replace(_prototypes(8, 2, "1.5"), masks_documents=True)
    assert max_imbalance(masked, 4) == 16 / 8


@pytest.mark.parametrize(
    ("count", "per_token", "expert_ranks", "expected"),
    [(8, 2, 4, 4.0), (8, 3, 8, 8 / 3), (8, 8, 4, 1.0), (8, 3, 4, 2 * 4 / 3), (8, 1, 2, 2.0)],
)
def test_max_imbalance_of_top_k(count: int, per_token: int, expert_ranks: int, expected: float) -> None:
    """A token goes to each expert at most once: a rank with one expert gets it once, a rank with two at most twice."""
    assert max_imbalance(_top_k(count, per_token), expert_ranks) == pytest.approx(expected, rel=1e-15)


SIZES = _prototypes(8, 2, "1.5")
"""Hidden size 32, MLP size 96; four sequences per micro-batch, one on each rank. At most 1.5 times the mean load."""


def _layout(micro_batches: int) -> Layout:
    return make_layout(1, 1, micro_batches, data=4, layer_experts=(0,), expert_ranks=4)


def _range(layout: Layout, **slow: Any) -> tuple[float, float]:
    """Return the seconds of a step with even load and with the highest load."""
    hardware = profile(**slow)
    even = predict(layout, SIZES, hardware, "float32").timeline.seconds
    return even, seconds_at_max_imbalance(layout, SIZES, step_plan(layout), hardware, "float32")


def test_experts_compute_on_the_rows_of_the_busiest_rank() -> None:
    """One forward pass, and a backward pass that repeats it and takes twice as long: 4 times, for two micro-batches."""
    forward = 16 * 2 * 2 * (2 * 32 * 96)
    even, most = _range(_layout(2), flops=1.0)
    assert most - even == pytest.approx(0.5 * 2 * 4 * forward)


def test_exchanges_end_when_the_busiest_rank_has_its_rows() -> None:
    """Rows of 32 features are sent three times, and twice more with a weight; three quarters go to other ranks. The
    exchange of eight counts does not depend on the load."""
    rows = 16 * 2 * 4
    exchanged = 3 * rows * (3 * 32 + 2 * 33) // 4
    counted = 8 * 8 * 3 // 4
    assert _range(_layout(1), point_to_point=1.0) == pytest.approx((exchanged + counted, 1.5 * exchanged + counted))

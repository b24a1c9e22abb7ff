"""The engine against the plain reference, under many layouts.

float64: losses and weights within 1e-12 everywhere. float32: bitwise if both add up in the same order. The orders
differ

- in a block that several layers share, with several micro-batches: the engine adds layer after layer, over the
  micro-batches of each; autograd adds the layers of one micro-batch first;
- with four data ranks: gloo adds up in an order of its own, and only the order of two summands is unique;
- with clipping: the norm is summed shard by shard and unit by unit, so the clip factor may differ in its last bit.

Moments in bfloat16 and in blocks are rounded by random bits that no layout decides (`tests/support/rounding.py`
computes them apart).
"""

import json
from dataclasses import replace

import pytest
import torch

from tests.support.depth import DEPTH
from tests.unit.trainer.engine.support import reference
from tests.unit.trainer.engine.support.agreement import assert_trained_alike
from tests.unit.trainer.engine.support.cases import EIGHT_IN_BALANCE, EIGHT_IN_WIDE, OPTIONS, WIDE, Case, each
from tests.unit.trainer.engine.support.running import Result, sound, want

ORDERS = ["Layered", "GPipe", "1F1B", "Interleaved"]
SHARDINGS = ["None", "Optimizer", "Gradients", "Full"]
KINDS = [name for name in OPTIONS if name]
"""Kinds of layers other than the plain one."""

MULTIPLIERS = (("Embedding", "0.1", "0"), ("Attention", "2", "0.5"), ("Norms", "3", "1"), ("Experts", "0", "1"))
"""Experts keep their weights."""

HALF_DENSE = json.dumps({"experts": {"count": 4, "denseLayers": [0, 2]}})
"""The first layer of each half has no experts to share."""

ONE_RANK = [
    *each(multipliers=MULTIPLIERS, options="Qwen3MoE", homes=["d", "hD"], clipping="Global"),
    Case(multipliers=MULTIPLIERS, options="all biases and norms", blocks=2, homes="Dh", window=1),
    *each(micro_batches=[1, 2, 8], order=ORDERS),
    *each(homes=["h", "D", "dhD"], window=[1, 2, 3]),
    *each(homes=["d", "h", "D"], keep="All", order=["Layered", "1F1B"]),
    *each(homes=["d", "hD"], keep="Products", order=["Layered", "1F1B"]),
    *each(options=KINDS, homes="Dh", keep="Products", window=1),
    Case(experts=6, prototypes=3, keep="Products", homes="D", order="1F1B"),
    Case(activation="SwiGLU", keep="Products", homes="h", blocks=2),
    *each(stash=True, homes=["d", "D"], order=ORDERS),
    Case(blocks=1, pattern="Cycle", homes="hD", window=1),
    Case(blocks=2, pattern="Cycle", homes="hD", window=1),
    Case(blocks=2, pattern="Segment", homes="hD", window=1),
    *each(clipping=["Global", "PerUnit"], homes=["d", "hD"]),
    Case(activation="SwiGLU", homes="h"),
    Case(layers=1, homes="D"),
    *each(experts=4, homes=["d", "hD"], micro_batches=[1, 8]),
    *each(experts=6, prototypes=[1, 3], keep="All", homes="D", order="1F1B"),
    Case(experts=6, prototypes=2, activation="SwiGLU", blocks=2, homes="h", window=1),
    Case(experts=6, prototypes=2, clipping="PerUnit", stash=True),
    *each(options=KINDS, homes="hD", window=1, blocks=2, clipping="PerUnit"),
    # Micro-batches have 24 tokens: chunks of 8 and of 5, the last one shorter.
    Case(vocabulary=300, loss_chunk=8, homes="d", z_loss="1e-3"),
    Case(vocabulary=300, loss_chunk=5, homes="hD", z_loss="1e-3"),
    Case(loss_chunk=1, soft_cap="2", z_loss="1e-3", clipping="Global"),
    *each(epsilon="1e-3", exclusions=[("Embedding",), ("Embedding", "Head")], homes="dhD"),
]
TWO_RANKS = [
    *each(data=2, sharding=SHARDINGS, multipliers=MULTIPLIERS, options="Mixtral", homes="dD"),
    Case(pipeline=2, multipliers=MULTIPLIERS, tied=True, blocks=1, clipping="PerUnit"),
    *each(data=2, sharding=SHARDINGS, micro_batches=[1, 8]),
    *each(data=2, sharding=SHARDINGS, homes="hDd", clipping="Global"),
    *each(data=2, sharding="Full", order=ORDERS, window=1, clipping="PerUnit"),
    *each(pipeline=2, order=ORDERS, micro_batches=[1, 2, 8]),
    *each(pipeline=2, order=ORDERS, homes="hD", stash=True, clipping="Global"),
    Case(pipeline=2, blocks=1, pattern="Cycle"),
    Case(pipeline=2, blocks=2, pattern="Cycle"),
    Case(pipeline=2, blocks=2, pattern="Segment"),
    Case(pipeline=2, layers=5, blocks=1, homes="D", clipping="PerUnit"),
    Case(pipeline=2, layers=6, blocks=3, micro_batches=1, order="GPipe", homes="h", window=1, clipping="PerUnit"),
    Case(pipeline=2, layers=5, order="GPipe", keep="All", homes="h"),
    Case(data=2, sharding="Full", keep="All", window=1, homes="D"),
    Case(data=2, sharding="Full", keep="Products", window=1, homes="D", options="Mixtral"),
    Case(pipeline=2, keep="Products", activation="SwiGLU", order="1F1B", homes="h", micro_batches=8),
    Case(data=2, sharding="Full", blocks=1, clipping="Global"),
    *each(data=2, sharding=SHARDINGS, experts=6, prototypes=2, homes="hDd"),
    *each(pipeline=2, order=ORDERS, experts=4, homes="hD", clipping="Global"),
    Case(pipeline=2, experts=6, prototypes=3, blocks=1, keep="All", activation="SwiGLU"),
    Case(pipeline=2, experts=4, micro_batches=8, order="1F1B"),
    *each(data=2, sharding="Full", options=KINDS, homes="dhD", clipping="Global"),
    *each(pipeline=2, options=KINDS, homes="D", order="1F1B", keep="All"),
    Case(pipeline=2, vocabulary=300, loss_chunk=7, soft_cap="2", z_loss="1e-3", homes="hD", clipping="PerUnit"),
    Case(data=2, sharding="Full", vocabulary=300, loss_chunk=5, z_loss="1e-3", clipping="Global", stash=True),
    Case(data=2, sharding="Full", exclusions=("Head",), epsilon="1e-3", homes="Dd"),
]
FOUR_RANKS = [
    *each(data=4, replicas=2, sharding=SHARDINGS[1:], homes="dhD", clipping="PerUnit"),
    *each(data=4, replicas=2, sharding="Full", order=ORDERS, window=1, clipping="Global"),
    Case(data=4, replicas=4, sharding="Full", homes="dD"),
    Case(pipeline=2, data=2, replicas=2, sharding="Full", blocks=1, homes="hD", stash=True, micro_batches=8),
    Case(data=4, replicas=2, sharding="Full", options="in balance", blocks=2, homes="hD", clipping="Global"),
    *each(data=4, sharding=SHARDINGS, clipping="Global"),
    *each(pipeline=4, micro_batches=[1, 2, 8], order=ORDERS),
    *each(pipeline=2, data=2, sharding=SHARDINGS, homes="dhD"),
    *each(pipeline=2, data=2, sharding="Full", order=ORDERS, clipping="PerUnit"),
    Case(pipeline=2, data=2, sharding="Full", blocks=1, homes="D", clipping="Global", stash=True),
    Case(pipeline=2, data=2, sharding="Optimizer", blocks=2, pattern="Segment", clipping="PerUnit"),
    Case(pipeline=4, layers=6, blocks=3, micro_batches=2, clipping="Global"),
    *each(pipeline=4, blocks=1, sharding=SHARDINGS, homes="dhD", clipping="Global"),
    *each(pipeline=4, layers=6, blocks=2, order=ORDERS[:3], homes="hD", clipping="PerUnit"),
    Case(pipeline=2, data=2, blocks=1, homes="d", clipping="PerUnit"),
    Case(pipeline=2, data=2, sharding="Full", experts=6, prototypes=2, homes="hD", order="1F1B", clipping="Global"),
    Case(pipeline=2, data=2, sharding="Full", experts=4, blocks=2, pattern="Segment", homes="D", keep="All"),
]
BITWISE = [
    Case(precision="float32"),
    *each(precision="float32", order=ORDERS, micro_batches=8),
    Case(precision="float32", homes="hD", window=1, stash=True),
    Case(precision="float32", homes="dhD", multipliers=(("Head", "0.5", "3"), ("Attention", "2", "1"))),
    Case(precision="float32", keep="All", homes="D"),
    Case(precision="float32", keep="Products", activation="SwiGLU", homes="D"),
    Case(precision="float32", keep="Products", experts=6, prototypes=2, micro_batches=8, homes="hD"),
    Case(precision="float32", micro_batches=1, blocks=1),
    *each(precision="float32", data=2, sharding=SHARDINGS, homes="dhD"),
    *each(precision="float32", data=2, replicas=2, sharding=SHARDINGS[1:], homes="dhD"),
    *each(precision="float32", pipeline=2, order=ORDERS, micro_batches=8),
    *each(precision="float32", pipeline=4, order=ORDERS, micro_batches=2),
    Case(precision="float32", pipeline=2, data=2, sharding="Full", homes="h"),
    Case(precision="float32", experts=6, prototypes=2, micro_batches=8, homes="hD"),
    Case(precision="float32", pipeline=2, data=2, sharding="Full", experts=6, prototypes=2, homes="h"),
    Case(precision="float32", part="Experts", experts=6, prototypes=2, blocks=2, homes="hD", micro_batches=1),
]
ROUNDED = [
    *(replace(case, moments="BFloat16") for case in DEPTH.of(BITWISE[::2], BITWISE)),
    *each(precision="float32", moments="BFloat16", experts=6, prototypes=2, expert_groups=[2, 3], homes="Dh", window=1),
]
"""Moments in bfloat16."""
ROUNDED_GRADIENTS = [replace(case, moments="Master", gradients="BFloat16") for case in DEPTH.of(ROUNDED[::3], ROUNDED)]
"""Gradients in bfloat16."""
IN_BLOCKS = [replace(case, moments="Float8", drawn=WIDE) for case in DEPTH.of(ROUNDED[::3], ROUNDED)]
SHARED_EXPERTS = [
    *each(part="Experts", experts=4, blocks=1, homes=["d", "hD"], window=1),
    Case(part="Experts", options="Qwen3MoE", blocks=2, pattern="Segment", homes="Dhd", clipping="PerUnit"),
    Case(part="Experts", options="in balance", blocks=2, homes="h", keep="All", order="1F1B"),
    Case(part="Experts", drawn=HALF_DENSE, blocks=2, pattern="Segment", tied=True, homes="dD"),
    *each(part="Experts", experts=6, prototypes=2, blocks=1, data=2, sharding=SHARDINGS, homes="hD"),
    *each(part="Experts", experts=4, blocks=1, pipeline=2, order=ORDERS, homes="dh", clipping="Global"),
    Case(part="Experts", options="in balance", blocks=1, pipeline=2, data=2, sharding="Full", clipping="PerUnit"),
    Case(part="Experts", experts=4, blocks=2, data=4, replicas=2, sharding="Full", homes="Dh", clipping="Global"),
]
"""Each layer has its own block."""
ROUNDED_EXPERTS = [
    *each(moments="BFloat16", data=2, expert_ranks=2, sharding=["None", "Full"], drawn=EIGHT_IN_BALANCE, homes="hD"),
    Case(moments="BFloat16", data=2, expert_ranks=2, expert_groups=2, drawn=EIGHT_IN_BALANCE, homes="hd"),
]
ROUNDED_EXPERTS += [
    # An update divides by a second moment of three bits: epsilon keeps what it makes of a gradient's rounding small.
    *(replace(case, moments="Float8", drawn=EIGHT_IN_WIDE, epsilon="1e-5") for case in ROUNDED_EXPERTS),
    *each(
        moments="Float8", drawn=WIDE, blocks=2, data=2, sharding=["Gradients", "Full"], homes="hD", clipping="Global"
    ),
    Case(moments="Float8", drawn=WIDE, tied=True, pipeline=2, blocks=1, homes="hD", clipping="PerUnit"),
]
"""In float64 the order of sums changes no rounding, unless a value is within 1e-9 of a bound."""
ROUNDED_AND_CLIPPED = [
    *each(gradients="BFloat16", homes="dhD", clipping=["Global", "PerUnit"], sharding=SHARDINGS, data=2),
    Case(gradients="BFloat16", homes="dhD", clipping="Global", pipeline=2, blocks=1),
    Case(gradients="BFloat16", moments="BFloat16", homes="hD", data=4, replicas=2, sharding="Full", clipping="Global"),
    *each(gradients="BFloat16", homes=["d", "h", "D"], algorithm="Muon", clipping="Global"),
    Case(gradients="BFloat16", data=2, expert_ranks=2, drawn=EIGHT_IN_BALANCE, homes="hD", clipping="Global"),
]
"""Gradients in bfloat16, whose norm clips them. As with moments, the order of sums changes no rounding in float64."""
CLOSE = [*ONE_RANK, *TWO_RANKS, *FOUR_RANKS, *SHARED_EXPERTS, *ROUNDED_EXPERTS, *ROUNDED_AND_CLIPPED]
want([*CLOSE, *BITWISE, *ROUNDED, *ROUNDED_GRADIENTS, *IN_BLOCKS])


@pytest.mark.parametrize("case", CLOSE, ids=lambda case: case.name)
def test_float64_agrees_with_the_reference(case: Case, engine_results: dict[Case, list[Result]]) -> None:
    assert_trained_alike(sound(engine_results, case), case)


@pytest.mark.processor_deep
@pytest.mark.parametrize("case", BITWISE, ids=lambda case: case.name)
def test_float32_agrees_to_the_bit(case: Case, engine_results: dict[Case, list[Result]]) -> None:
    found = sound(engine_results, case)
    losses, weights = reference.train(case)
    assert found.losses == losses
    for name, expected in weights.items():
        assert torch.equal(found.weights[name], expected), name


@pytest.mark.processor_deep
@pytest.mark.parametrize("case", [*ROUNDED, *IN_BLOCKS, *ROUNDED_GRADIENTS], ids=lambda case: case.name)
def test_rounded_moments_and_gradients_agree_to_the_bit(case: Case, engine_results: dict[Case, list[Result]]) -> None:
    losses, weights, first_moments = reference.train_with_moments(case)
    found = sound(engine_results, case)
    assert found.losses == losses
    for mine, theirs in ((found.weights, weights), (found.first_moments, first_moments)):
        for name, expected in theirs.items():
            assert torch.equal(mine[name], expected), name


@pytest.mark.parametrize("case", [*TWO_RANKS, *ONE_RANK[-8:]], ids=lambda case: case.name)
def test_evaluation_is_the_loss_of_the_trained_weights(case: Case, engine_results: dict[Case, list[Result]]) -> None:
    sound(engine_results, case)
    expected = reference.evaluate(case, engine_results[case][0].weights)
    assert sum(result.evaluation for result in engine_results[case]) == pytest.approx(expected, rel=1e-12)

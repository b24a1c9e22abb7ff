"""The engine against the plain reference, under many layouts.

float64: losses and weights within 1e-12 everywhere. float32: bitwise if both add up in the same order. The orders
differ

- in a block that several layers share, with several micro-batches: the engine adds layer after layer, over the
  micro-batches of each; autograd adds the layers of one micro-batch first;
- with four data ranks: gloo adds up in an order of its own, and only the order of two summands is unique;
- with clipping: the norm is summed shard by shard and unit by unit, so the clip factor may differ in its last bit.
"""

import json

import pytest
import torch

from tests.unit.trainer.engine.support import reference
from tests.unit.trainer.engine.support.agreement import assert_trained_alike
from tests.unit.trainer.engine.support.cases import OPTIONS, Case
from tests.unit.trainer.engine.support.running import Result, sound, want

ORDERS = ("Layered", "GPipe", "1F1B", "Interleaved")
SHARDINGS = ("None", "Optimizer", "Gradients", "Full")
KINDS = [name for name in OPTIONS if name]
"""Kinds of layers other than the plain one."""

MULTIPLIERS = (("Embedding", "0.1", "0"), ("Attention", "2", "0.5"), ("Norms", "3", "1"), ("Experts", "0", "1"))
"""Experts keep their weights."""

HALF_DENSE = json.dumps({"experts": {"count": 4, "denseLayers": [0, 2]}})
"""The first layer of each half has no experts to share."""

ONE_RANK = [
    *(Case(multipliers=MULTIPLIERS, options="Qwen3MoE", homes=h, clipping="Global") for h in ("d", "hD")),
    Case(multipliers=MULTIPLIERS, options="all biases and norms", blocks=2, homes="Dh", window=1),
    *(Case(micro_batches=n, order=order) for n in (1, 2, 8) for order in ORDERS),
    *(Case(homes=homes, window=window) for homes in ("h", "D", "dhD") for window in (1, 2, 3)),
    *(Case(homes=homes, recompute=False, order=order) for homes in ("d", "h", "D") for order in ("Layered", "1F1B")),
    *(Case(stash=True, homes=homes, order=order) for homes in ("d", "D") for order in ORDERS),
    *(Case(blocks=k, pattern=p, homes="hD", window=1) for k, p in ((1, "Cycle"), (2, "Cycle"), (2, "Segment"))),
    *(Case(clipping=clipping, homes=homes) for clipping in ("Global", "PerUnit") for homes in ("d", "hD")),
    Case(activation="SwiGLU", homes="h"),
    Case(layers=1, homes="D"),
    *(Case(experts=4, homes=homes, micro_batches=n) for homes in ("d", "hD") for n in (1, 8)),
    *(Case(experts=6, prototypes=p, recompute=False, homes="D", order="1F1B") for p in (1, 3)),
    Case(experts=6, prototypes=2, activation="SwiGLU", blocks=2, homes="h", window=1),
    Case(experts=6, prototypes=2, clipping="PerUnit", stash=True),
    *(Case(options=kind, homes="hD", window=1, blocks=2, clipping="PerUnit") for kind in KINDS),
    # Micro-batches have 24 tokens: chunks of 8 and of 5, the last one shorter.
    *(Case(vocabulary=300, loss_chunk=most, homes=homes, z_loss="1e-3") for most, homes in ((8, "d"), (5, "hD"))),
    Case(loss_chunk=1, soft_cap="2", z_loss="1e-3", clipping="Global"),
    *(Case(epsilon="1e-3", exclusions=names, homes="dhD") for names in (("Embedding",), ("Embedding", "Head"))),
]
TWO_RANKS = [
    *(
        Case(data=2, sharding=sharding, multipliers=MULTIPLIERS, options="Mixtral", homes="dD")
        for sharding in SHARDINGS
    ),
    Case(pipeline=2, multipliers=MULTIPLIERS, tied=True, blocks=1, clipping="PerUnit"),
    *(Case(data=2, sharding=sharding, micro_batches=n) for sharding in SHARDINGS for n in (1, 8)),
    *(Case(data=2, sharding=sharding, homes="hDd", clipping="Global") for sharding in SHARDINGS),
    *(Case(data=2, sharding="Full", order=order, window=1, clipping="PerUnit") for order in ORDERS),
    *(Case(pipeline=2, order=order, micro_batches=n) for order in ORDERS for n in (1, 2, 8)),
    *(Case(pipeline=2, order=order, homes="hD", stash=True, clipping="Global") for order in ORDERS),
    *(Case(pipeline=2, blocks=k, pattern=p) for k, p in ((1, "Cycle"), (2, "Cycle"), (2, "Segment"))),
    Case(pipeline=2, layers=5, blocks=1, homes="D", clipping="PerUnit"),
    Case(pipeline=2, layers=6, blocks=3, micro_batches=1, order="GPipe", homes="h", window=1, clipping="PerUnit"),
    Case(pipeline=2, layers=5, order="GPipe", recompute=False, homes="h"),
    Case(data=2, sharding="Full", recompute=False, window=1, homes="D"),
    Case(data=2, sharding="Full", blocks=1, clipping="Global"),
    *(Case(data=2, sharding=sharding, experts=6, prototypes=2, homes="hDd") for sharding in SHARDINGS),
    *(Case(pipeline=2, order=order, experts=4, homes="hD", clipping="Global") for order in ORDERS),
    Case(pipeline=2, experts=6, prototypes=3, blocks=1, recompute=False, activation="SwiGLU"),
    Case(pipeline=2, experts=4, micro_batches=8, order="1F1B"),
    *(Case(data=2, sharding="Full", options=kind, homes="dhD", clipping="Global") for kind in KINDS),
    *(Case(pipeline=2, options=kind, homes="D", order="1F1B", recompute=False) for kind in KINDS),
    Case(pipeline=2, vocabulary=300, loss_chunk=7, soft_cap="2", z_loss="1e-3", homes="hD", clipping="PerUnit"),
    Case(data=2, sharding="Full", vocabulary=300, loss_chunk=5, z_loss="1e-3", clipping="Global", stash=True),
    Case(data=2, sharding="Full", exclusions=("Head",), epsilon="1e-3", homes="Dd"),
]
FOUR_RANKS = [
    *(Case(data=4, replicas=2, sharding=sharding, homes="dhD", clipping="PerUnit") for sharding in SHARDINGS[1:]),
    *(Case(data=4, replicas=2, sharding="Full", order=order, window=1, clipping="Global") for order in ORDERS),
    Case(data=4, replicas=4, sharding="Full", homes="dD"),
    Case(pipeline=2, data=2, replicas=2, sharding="Full", blocks=1, homes="hD", stash=True, micro_batches=8),
    Case(data=4, replicas=2, sharding="Full", options="in balance", blocks=2, homes="hD", clipping="Global"),
    *(Case(data=4, sharding=sharding, clipping="Global") for sharding in SHARDINGS),
    *(Case(pipeline=4, micro_batches=n, order=order) for n in (1, 2, 8) for order in ORDERS),
    *(Case(pipeline=2, data=2, sharding=sharding, homes="dhD") for sharding in SHARDINGS),
    *(Case(pipeline=2, data=2, sharding="Full", order=order, clipping="PerUnit") for order in ORDERS),
    Case(pipeline=2, data=2, sharding="Full", blocks=1, homes="D", clipping="Global", stash=True),
    Case(pipeline=2, data=2, sharding="Optimizer", blocks=2, pattern="Segment", clipping="PerUnit"),
    Case(pipeline=4, layers=6, blocks=3, micro_batches=2, clipping="Global"),
    *(Case(pipeline=4, blocks=1, sharding=sharding, homes="dhD", clipping="Global") for sharding in SHARDINGS),
    *(Case(pipeline=4, layers=6, blocks=2, order=order, homes="hD", clipping="PerUnit") for order in ORDERS[:3]),
    Case(pipeline=2, data=2, blocks=1, homes="d", clipping="PerUnit"),
    Case(pipeline=2, data=2, sharding="Full", experts=6, prototypes=2, homes="hD", order="1F1B", clipping="Global"),
    Case(pipeline=2, data=2, sharding="Full", experts=4, blocks=2, pattern="Segment", homes="D", recompute=False),
]
BITWISE = [
    Case(precision="float32"),
    *(Case(precision="float32", order=order, micro_batches=8) for order in ORDERS),
    Case(precision="float32", homes="hD", window=1, stash=True),
    Case(precision="float32", homes="dhD", multipliers=(("Head", "0.5", "3"), ("Attention", "2", "1"))),
    Case(precision="float32", recompute=False, homes="D"),
    Case(precision="float32", micro_batches=1, blocks=1),
    *(Case(precision="float32", data=2, sharding=sharding, homes="dhD") for sharding in SHARDINGS),
    *(Case(precision="float32", data=2, replicas=2, sharding=sharding, homes="dhD") for sharding in SHARDINGS[1:]),
    *(Case(precision="float32", pipeline=2, order=order, micro_batches=8) for order in ORDERS),
    *(Case(precision="float32", pipeline=4, order=order, micro_batches=2) for order in ORDERS),
    Case(precision="float32", pipeline=2, data=2, sharding="Full", homes="h"),
    Case(precision="float32", experts=6, prototypes=2, micro_batches=8, homes="hD"),
    Case(precision="float32", pipeline=2, data=2, sharding="Full", experts=6, prototypes=2, homes="h"),
    Case(precision="float32", part="Experts", experts=6, prototypes=2, blocks=2, homes="hD", micro_batches=1),
]
SHARED_EXPERTS = [
    *(Case(part="Experts", experts=4, blocks=1, homes=homes, window=1) for homes in ("d", "hD")),
    Case(part="Experts", options="Qwen3MoE", blocks=2, pattern="Segment", homes="Dhd", clipping="PerUnit"),
    Case(part="Experts", options="in balance", blocks=2, homes="h", recompute=False, order="1F1B"),
    Case(part="Experts", drawn=HALF_DENSE, blocks=2, pattern="Segment", tied=True, homes="dD"),
    *(Case(part="Experts", experts=6, prototypes=2, blocks=1, data=2, sharding=s, homes="hD") for s in SHARDINGS),
    *(Case(part="Experts", experts=4, blocks=1, pipeline=2, order=o, homes="dh", clipping="Global") for o in ORDERS),
    Case(part="Experts", options="in balance", blocks=1, pipeline=2, data=2, sharding="Full", clipping="PerUnit"),
    Case(part="Experts", experts=4, blocks=2, data=4, replicas=2, sharding="Full", homes="Dh", clipping="Global"),
]
"""Each layer has its own block."""
CLOSE = [*ONE_RANK, *TWO_RANKS, *FOUR_RANKS, *SHARED_EXPERTS]
want([*CLOSE, *BITWISE])


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


@pytest.mark.parametrize("case", [*TWO_RANKS, *ONE_RANK[-8:]], ids=lambda case: case.name)
def test_evaluation_is_the_loss_of_the_trained_weights(case: Case, engine_results: dict[Case, list[Result]]) -> None:
    sound(engine_results, case)
    expected = reference.evaluate(case, engine_results[case][0].weights)
    assert sum(result.evaluation for result in engine_results[case]) == pytest.approx(expected, rel=1e-12)

"""Sequences cut over ranks, against the plain reference: losses and weights in every layout, to 1e-12 in float64."""

import json
from math import prod
from typing import Any

import pytest
from pseudoreal_trainer.plan.effects import traffic_bytes
from pseudoreal_trainer.plan.lower import step_plan

from tests.support.depth import DEPTH
from tests.unit.trainer.engine.support.agreement import (
    assert_evaluated_alike,
    assert_trained_alike,
    assert_written_alike,
)
from tests.unit.trainer.engine.support.cases import Case, each
from tests.unit.trainer.engine.support.running import Result, sound, want
from tests.unit.trainer.plan.memory.support.sizes_of_case import sizes_of

ORDERS = ["Layered", "GPipe", "1F1B", "Interleaved"]
LONG = json.dumps({"sequenceLength": 12})
"""Chunks of three tokens on two ranks."""
LONGER = json.dumps({"sequenceLength": 16})
BALANCED = {
    "type": "TopK",
    "count": 4,
    "topK": {"perToken": 2, "size": 6, "biasUpdateRate": "0.03", "routerZLoss": "0.05", "sharedExperts": 1},
    "denseLayers": [1],
}
WITH_EXPERTS = json.dumps({"sequenceLength": 8, "experts": BALANCED})

TWO: dict[str, Any] = {"data": 2, "context_ranks": 2, "drawn": LONG}
FOUR: dict[str, Any] = {"data": 4, "drawn": LONGER}
TWO_RANKS = [
    *each(**TWO, order=ORDERS, micro_batches=[1, 3]),
    *each(**TWO, sharding=["None", "Optimizer", "Gradients", "Full"], homes="hDd", clipping="Global"),
    *each(**TWO, keep=["Inputs", "Products", "All"], options=["Llama3", "Mistral", "Qwen2", "OLMo2"], homes="h"),
    *each(**TWO, documents=True, keep=["Inputs", "All"], options=["", "Mistral"], clipping="PerUnit"),
    *each(**TWO, sequences=1, loss_chunk=5, z_loss="1e-3", tied=True),
    Case(**TWO, stash=True, homes="h", sharding="Full", window=1, clipping="Global", speculates=True),
    *each(
        data=2,
        context_ranks=2,
        drawn=WITH_EXPERTS,
        expert_ranks=[1, 2],
        keep=["Inputs", "All"],
        documents=[True, False],
    ),
    Case(data=2, context_ranks=2, drawn=WITH_EXPERTS, expert_ranks=2, expert_groups=2, homes="hD", sharding="Full"),
]
FOUR_RANKS = [
    *each(**FOUR, context_ranks=[2, 4], sharding=["None", "Full"], documents=[False, True], homes="dhD"),
    *each(**FOUR, context_ranks=2, replicas=2, sharding="Full", clipping="Global", sequences=[2, 4]),
    *each(pipeline=2, **TWO, order=ORDERS, micro_batches=4, documents=[False, True]),
    Case(pipeline=2, **TWO, blocks=1, sharding="Full", homes="D", stash=True, clipping="Global"),
    Case(**TWO, pipeline=2, blocks=2, next_sharing=(4, "Cycle")),
    # A micro-batch has one sequence: the second group of ranks has none.
    Case(**FOUR, context_ranks=2, sequences=1, sharding="Full", clipping="Global"),
]


def _meshes_of_eight() -> list[Case]:
    """Return a case for each mesh of eight ranks with pipeline, replicas, shards, and sequences over two ranks or
    more."""
    return [
        Case(pipeline=p, data=r * s, replicas=r, context_ranks=c, sharding="Full", clipping="Global", drawn=LONGER)
        for p in (1, 2, 4)
        for r in (1, 2, 4)
        for s in (2, 4, 8)
        for c in (2, 4, 8)
        if prod((p, r, s)) == 8 and s % c == 0
    ]


EIGHT_RANKS = DEPTH.of(_meshes_of_eight()[::6], _meshes_of_eight())
SOME = DEPTH.of(FOUR_RANKS[::2], FOUR_RANKS)
CLOSE = [*TWO_RANKS, *SOME, *EIGHT_RANKS]
WRITTEN = [*TWO_RANKS[::4], *SOME[::4]]
want(CLOSE)
want(WRITTEN, written=True)


@pytest.mark.parametrize("case", CLOSE, ids=lambda case: case.name)
def test_training_with_context_ranks_equals_the_reference(case: Case, engine_results: dict[Case, list[Result]]) -> None:
    assert_trained_alike(sound(engine_results, case), case)


@pytest.mark.parametrize("case", CLOSE, ids=lambda case: case.name)
def test_evaluation_with_context_ranks_equals_the_reference(
    case: Case, engine_results: dict[Case, list[Result]]
) -> None:
    assert_evaluated_alike(engine_results, case)


@pytest.mark.parametrize("case", WRITTEN, ids=lambda case: case.name)
def test_text_is_the_text_of_a_plain_model(case: Case, engine_results: dict[Case, list[Result]]) -> None:
    assert_written_alike(engine_results, case)


@pytest.mark.parametrize("case", [c for c in CLOSE if c.sequences == 4 and not c.next_sharing], ids=lambda c: c.name)
def test_gathers_move_the_bytes_of_the_plan(case: Case, engine_results: dict[Case, list[Result]]) -> None:
    """Keys and values in each forward pass and in each recomputed one, and their gradients: for a layer of E elements
    of keys and values on a rank, (C - 1) E elements each time."""
    layout, model = case.layout, case.model
    local = model.sequence_length // case.context_ranks * case.sequences * case.context_ranks // case.data
    gathered = (case.context_ranks - 1) * 2 * model.key_size * local * 8
    passes = (3 if case.keep == "Inputs" else 2) * case.micro_batches
    sizes, plans = sizes_of(case), step_plan(layout)
    for rank, result in enumerate(engine_results[case]):
        pipeline = rank // case.data
        layers = sum(0 < position < layout.head for position in layout.positions(pipeline))
        expected = layers * passes * gathered
        assert [moved.get("context", 0) for moved in result.moved] == [expected] * len(result.moved)
        assert traffic_bytes(layout, sizes, plans[pipeline])["context"] == expected

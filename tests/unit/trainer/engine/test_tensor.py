"""Matrices of layers cut over ranks, against the plain reference: losses and weights in every layout, to 1e-12 in
float64."""

import json
from math import prod
from typing import Any

import pytest
from pseudoreal_trainer.plan.effects import traffic_bytes
from pseudoreal_trainer.plan.lower import step_plan
from pseudoreal_trainer.plan.units import units_of

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
FOUR_HEADS = {"sequenceLength": 16, "attention": {"heads": 4, "keyValueHeads": 2}}
LONGER = json.dumps(FOUR_HEADS)
"""On four tensor ranks, two ranks share each key head."""
ONE_KEY = json.dumps({"sequenceLength": 8, "attention": {"heads": 4, "keyValueHeads": 1}})
BIASED = json.dumps(
    {
        "sequenceLength": 8,
        "attention": {"heads": 2, "bias": "All", "queryKeyNorm": "PerHead"},
        "norm": {"placement": "Both"},
        "feedForward": {"size": 24, "bias": "All"},
    }
)
BIASED_MLP = json.dumps({"sequenceLength": 8, "feedForward": {"size": 24, "bias": "All"}})
"""Without a norm after the MLP, so that the last product is not recomputed."""
BALANCED: dict[str, Any] = {
    "type": "TopK",
    "count": 4,
    "topK": {"perToken": 2, "size": 6, "biasUpdateRate": "0.03", "routerZLoss": "0.05", "sharedExperts": 1},
    "denseLayers": [1],
}
WITH_EXPERTS = json.dumps({"sequenceLength": 8, "experts": BALANCED})

RANKS: dict[str, Any] = {"data": 2, "tensor_ranks": 2}
TWO: dict[str, Any] = {**RANKS, "drawn": LONG}
FOUR: dict[str, Any] = {"data": 4, "drawn": LONGER}
TWO_RANKS = [
    Case(**RANKS, drawn=BIASED_MLP, clipping="Global"),
    *each(**TWO, order=ORDERS, micro_batches=[1, 3]),
    *each(**TWO, sharding=["None", "Optimizer", "Gradients", "Full"], homes="hDd", clipping="Global"),
    *each(**TWO, keep=["Inputs", "Products", "All"], options=["Llama3", "Mistral", "Qwen2"], homes="h"),
    *each(**RANKS, drawn=[BIASED, ONE_KEY], keep=["Inputs", "All"], clipping=["Global", "PerUnit"]),
    *each(**TWO, documents=True, keep=["Inputs", "All"], options=["", "Mistral"], clipping="PerUnit"),
    *each(**TWO, sequences=1, loss_chunk=5, z_loss="1e-3", tied=True),
    Case(**TWO, loss_chunk=7, soft_cap="2", z_loss="1e-3", documents=True, homes="D", clipping="PerUnit"),
    # Two ranks do not divide this vocabulary.
    *each(**TWO, vocabulary=301, tied=[False, True], clipping="Global"),
    Case(**TWO, stash=True, homes="h", sharding="Full", window=1, clipping="Global", speculates=True),
    *each(
        **RANKS, drawn=WITH_EXPERTS, expert_ranks=[1, 2], keep=["Inputs", "All"], documents=[True, False], homes="hd"
    ),
    Case(**RANKS, drawn=WITH_EXPERTS, expert_ranks=2, expert_groups=2, homes="hD", sharding="Full", clipping="Global"),
    Case(**TWO, blocks=2, next_sharing=(4, "Cycle"), clipping="Global"),
]
FOUR_RANKS = [
    *each(**FOUR, tensor_ranks=[2, 4], sharding=["None", "Full"], documents=[False, True], homes="dhD"),
    *each(**FOUR, tensor_ranks=2, replicas=2, sharding="Full", clipping="Global", sequences=[2, 4]),
    *each(**FOUR, tensor_ranks=2, context_ranks=2, sharding=["None", "Full"], documents=[False, True], homes="dh"),
    *each(pipeline=2, **TWO, order=ORDERS, micro_batches=4, documents=[False, True]),
    Case(pipeline=2, **TWO, blocks=1, sharding="Full", homes="D", stash=True, clipping="Global"),
    Case(pipeline=2, **TWO, tied=True, soft_cap="2", z_loss="1e-3", homes="h", clipping="Global"),
    Case(**TWO, pipeline=2, blocks=2, next_sharing=(4, "Cycle")),
    # A micro-batch has one sequence: the second group of ranks has none.
    Case(**FOUR, tensor_ranks=2, sequences=1, sharding="Full", clipping="Global"),
    Case(data=4, tensor_ranks=2, drawn=WITH_EXPERTS, expert_ranks=4, sharding="Full", clipping="Global"),
]


def _meshes_of_eight() -> list[Case]:
    """Return a case for each mesh of eight ranks with pipeline, replicas, shards, parts of sequences, experts, and
    matrices cut over two ranks or more."""
    wide = {**BALANCED, "topK": {**BALANCED["topK"], "size": 8}}  # four slices of the shared expert
    experts = json.dumps({**FOUR_HEADS, "experts": wide})
    return [
        Case(
            pipeline=p,
            data=r * s,
            replicas=r,
            context_ranks=c,
            tensor_ranks=t,
            expert_ranks=e,
            sharding="Full",
            clipping="Global",
            drawn=LONGER if e == 1 else experts,
        )
        for p in (1, 2, 4)
        for r in (1, 2, 4)
        for s in (2, 4, 8)
        for c in (1, 2, 4)
        for t in (2, 4)
        for e in (1, 2, 4)
        if prod((p, r, s)) == 8 and s % (c * t) == 0 and s % e == 0
    ]


EIGHT_RANKS = DEPTH.of(_meshes_of_eight()[::12], _meshes_of_eight())
SOME = DEPTH.of(FOUR_RANKS[::2], FOUR_RANKS)
CLOSE = [*TWO_RANKS, *SOME, *EIGHT_RANKS]
WRITTEN = [*TWO_RANKS[::4], *SOME[::4]]
want(CLOSE)
want(WRITTEN, written=True)


@pytest.mark.parametrize("case", CLOSE, ids=lambda case: case.name)
def test_training_with_tensor_ranks_equals_the_reference(case: Case, engine_results: dict[Case, list[Result]]) -> None:
    assert_trained_alike(sound(engine_results, case), case)


@pytest.mark.parametrize("case", CLOSE, ids=lambda case: case.name)
def test_evaluation_with_tensor_ranks_equals_the_reference(
    case: Case, engine_results: dict[Case, list[Result]]
) -> None:
    assert_evaluated_alike(engine_results, case)


@pytest.mark.parametrize("case", WRITTEN, ids=lambda case: case.name)
def test_text_is_the_text_of_a_plain_model(case: Case, engine_results: dict[Case, list[Result]]) -> None:
    assert_written_alike(engine_results, case)


_SLICED = ("query", "key", "value", "gate", "up")
"""Matrices of which all tensors are cut, if there are as many heads as ranks."""
_PLAIN = [case for case in CLOSE if case.sequences == 4 and not case.next_sharing and not case.model.experts]


@pytest.mark.parametrize("case", _PLAIN, ids=lambda case: case.name)
def test_exchanges_move_the_bytes_of_the_plan(case: Case, engine_results: dict[Case, list[Result]]) -> None:
    """Attention and the MLP each gather tokens and sum outputs: in a forward pass, again in a recomputed pass, and for
    gradients in a backward pass. A recomputed pass leaves out its last sum, unless a norm follows. Each exchange sends
    this rank's tokens K - 1 times. The embedding sums its outputs and gathers their gradients; the head gathers its
    inputs, sums their gradients, and gathers two numbers of each token of all K ranks. In addition, a step sums the
    gradients of replicated tensors once."""
    layout, model, ranks = case.layout, case.model, case.tensor_ranks
    others, keys = ranks - 1, model.key_size // model.head_size
    tokens = model.sequence_length * case.sequences // case.data
    unread = case.keep == "Inputs" and model.norm.placement == "Pre"
    of_layer = (12 if case.keep == "Inputs" else 8) - unread
    exchanged = of_layer * case.micro_batches * others * tokens * model.hidden_size * 8
    sizes, plans = sizes_of(case), step_plan(layout)
    has_slices = model.vocabulary_size % ranks == 0
    of_embedding, of_head = 2 * model.hidden_size, 2 * model.hidden_size + 2 * ranks
    for rank, result in enumerate(engine_results[case]):
        pipeline = rank // case.data
        layers = sum(0 < position < layout.head for position in layout.positions(pipeline))
        replicated = 0
        for index in layout.local_units(pipeline):
            for one in units_of(model, case.sharing)[index].parameters:
                *_, matrix, tensor = one.name.split(".")
                is_sliced = matrix in _SLICED or (matrix in ("output", "down") and tensor == "weight")
                has_keys = matrix not in ("key", "value") or keys % ranks == 0
                is_of_block = one.name.startswith("blocks.")
                is_replicated = (
                    not (is_sliced and has_keys) if is_of_block else one.name == "norm.weight" and has_slices
                )
                replicated += prod(one.whole) * 8 if is_replicated else 0
        positions = layout.positions(pipeline)
        numbers = has_slices * ((0 in positions) * of_embedding + (layout.head in positions) * of_head)
        at_the_ends = case.micro_batches * others * tokens * numbers * 8
        expected = layers * exchanged + at_the_ends + 2 * others * replicated // ranks
        assert [moved.get("tensor", 0) for moved in result.moved] == [expected] * len(result.moved)
        assert traffic_bytes(layout, sizes, plans[pipeline])["tensor"] == expected

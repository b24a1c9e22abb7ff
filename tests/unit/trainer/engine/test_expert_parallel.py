"""Experts spread over ranks, against the plain reference: losses and weights in every layout, to 1e-12 in float64."""

import json
from dataclasses import replace
from math import prod

import pytest
from pseudoreal_trainer.plan.mesh import Mesh
from torch import Tensor

from tests.support.depth import DEPTH
from tests.unit.trainer.engine.support import reference
from tests.unit.trainer.engine.support.agreement import assert_trained_alike
from tests.unit.trainer.engine.support.cases import EIGHT_IN_BALANCE, STEPS, Case, each
from tests.unit.trainer.engine.support.running import Result, sound, want

ORDERS = ["Layered", "GPipe", "1F1B", "Interleaved"]
SHARDINGS = ["None", "Optimizer", "Gradients", "Full"]
MANY = {"type": "TopK", "count": 16, "topK": {"perToken": 2, "size": 4}}
"""Most of 16 experts get no token in a micro-batch."""
FEW = json.dumps({"experts": {"count": 8, "prototypes": 2, "capacityFactor": "0.5"}})
"""Half of all choices are refused, and many experts get no token in a micro-batch."""

TWO_RANKS = [
    *each(data=2, expert_ranks=2, experts=4, order=ORDERS, micro_batches=[1, 3]),
    *each(data=2, expert_ranks=2, experts=6, prototypes=2, sharding=SHARDINGS, homes="hDd"),
    *each(data=2, expert_ranks=2, experts=6, prototypes=3, keep="All", homes=["d", "hD"], window=1),
    *each(data=2, expert_ranks=2, options="Mixtral", clipping=["Global", "PerUnit"], homes="Dd"),
    *each(data=2, expert_ranks=2, options="Mixtral", keep="All", order=ORDERS[:3]),
    Case(data=2, expert_ranks=2, experts=4, stash=True, homes="h", sharding="Full", window=1),
    Case(data=2, expert_ranks=2, drawn=FEW, micro_batches=8, clipping="Global"),
    Case(data=2, expert_ranks=2, experts=4, documents=True, prototypes=2, clipping="Global"),
    Case(data=2, expert_ranks=2, experts=4, part="Experts", blocks=1, homes="hD", clipping="PerUnit"),
]
FOUR_RANKS = [
    *each(data=4, expert_ranks=[2, 4], experts=8, prototypes=2, sharding="Full", homes="dhD"),
    *each(data=4, expert_ranks=2, experts=4, sharding=SHARDINGS, clipping="PerUnit"),
    *each(data=4, expert_ranks=2, replicas=2, drawn=EIGHT_IN_BALANCE, sharding=SHARDINGS[1:], clipping="Global"),
    *each(pipeline=2, data=2, expert_ranks=2, experts=4, order=ORDERS, clipping="Global"),
    Case(pipeline=2, data=2, expert_ranks=2, drawn=EIGHT_IN_BALANCE, blocks=1, homes="D", part="Experts"),
    Case(pipeline=2, data=2, expert_ranks=2, experts=6, prototypes=3, blocks=1, sharding="Full", stash=True),
    Case(pipeline=2, data=2, expert_ranks=2, options="Mixtral", keep="All", order="1F1B", micro_batches=4),
    Case(data=4, expert_ranks=4, drawn=EIGHT_IN_BALANCE, micro_batches=3, homes="hD", window=1, clipping="PerUnit"),
]


def _meshes_of_eight() -> list[Case]:
    """Return a case for each mesh of eight ranks with pipeline, replicas, shards, and experts over at least two
    ranks."""
    found = []
    for p, r, s, e in ((p, r, s, e) for p in (1, 2, 4) for r in (1, 2, 4) for s in (2, 4, 8) for e in (2, 4, 8)):
        if prod((p, r, s)) == 8 and s % e == 0:
            sharding = "Full" if r > 1 or e == 2 else "None"
            assert Mesh(pipeline=p, replica=r, shard=s, expert=e).ranks == 8
            mesh = Case(pipeline=p, data=r * s, replicas=r, expert_ranks=e, sharding=sharding)
            found.append(replace(mesh, drawn=EIGHT_IN_BALANCE, clipping="Global"))
    return found


EIGHT_RANKS = [
    *DEPTH.of(_meshes_of_eight()[::6], _meshes_of_eight()),
    # Micro-batches have four sequences: four of the ranks have none.
    Case(data=8, expert_ranks=4, experts=4, clipping="Global"),
]
CLOSE = [*TWO_RANKS, *FOUR_RANKS, *EIGHT_RANKS]
want(CLOSE)


@pytest.mark.parametrize("case", CLOSE, ids=lambda case: case.name)
def test_expert_parallel_training_equals_the_reference(case: Case, engine_results: dict[Case, list[Result]]) -> None:
    assert_trained_alike(sound(engine_results, case), case)


@pytest.mark.parametrize("case", TWO_RANKS, ids=lambda case: case.name)
def test_expert_parallel_evaluation_equals_the_reference(case: Case, engine_results: dict[Case, list[Result]]) -> None:
    expected = reference.evaluate(case, sound(engine_results, case).weights)
    assert sum(result.evaluation for result in engine_results[case]) == pytest.approx(expected, rel=1e-12)


COUNTED = [
    *each(data=2, expert_ranks=2, options="Mixtral", micro_batches=[2, 8], sharding="Full", homes="h"),
    Case(data=4, expert_ranks=4, drawn=json.dumps({"experts": MANY}), micro_batches=3, keep="All"),
    Case(pipeline=2, data=2, expert_ranks=2, options="Mixtral", order="1F1B", micro_batches=4),
]
want(COUNTED, events=True)
WIDTH, NUMBER = 8, 8
"""Bytes of an element in float64, and of a count of tokens."""


def _rows(case: Case) -> dict[int, list[list[int]]]:
    """Return layer -> rows of the first step that each data rank sends to each other rank, from the choices of a plain
    model."""
    model, _ = reference.model_and_optimizer(case)
    experts, found = case.model.experts, dict[int, list[list[int]]]()
    assert experts is not None
    assert experts.top_k is not None, "only these are counted here"
    per_token, of_each = experts.top_k.per_token, experts.count // case.expert_ranks
    for layer, block in enumerate(model.blocks):
        found[layer] = [[0] * case.data for _ in range(case.data)]
        for source in range(case.data):
            for windows in reference.part_of(reference.batch_of(case, 0), source, case.data):
                logits: list[Tensor] = []
                hook = block.get_submodule("router").register_forward_hook(
                    lambda *args, kept=logits: kept.append(args[-1])
                )
                model(windows[:, :-1])
                hook.remove()
                for expert in logits[0].topk(per_token).indices.flatten().tolist():
                    found[layer][source][expert // of_each] += 1
    return found


@pytest.mark.parametrize("case", COUNTED, ids=lambda case: case.name)
def test_exchanges_move_the_bytes_of_the_rows_sent_to_other_ranks(
    case: Case, engine_results: dict[Case, list[Result]]
) -> None:
    """Forward, rows are sent once; backward, twice if they are recomputed. Gradients are sent with the rows'
    weights."""
    rows, model = _rows(case), case.model
    assert model.experts is not None
    times = 2 if case.keep == "Inputs" else 1
    for rank, result in enumerate(engine_results[case]):
        own, expected = rank % case.data, 0
        for layer, sent in rows.items():
            if case.layout.rank_of(layer + 1) != rank // case.data:
                continue
            leaving = sum(sent[own]) - sent[own][own]
            answered = sum(of[own] for of in sent) - sent[own][own]
            told = case.micro_batches * model.experts.count * (case.expert_ranks - 1) // case.expert_ranks
            to_experts = leaving * (times * model.hidden_size + model.hidden_size + 1)
            back = answered * (2 * model.hidden_size + 1)
            expected += WIDTH * (to_experts + back) + NUMBER * told
        assert result.moved[0]["experts"] == expected > 0


@pytest.mark.parametrize("case", COUNTED, ids=lambda case: case.name)
def test_a_step_has_the_planned_exchanges(case: Case, engine_results: dict[Case, list[Result]]) -> None:
    """Five exchanges per layer and micro-batch, four if graphs are kept. In layered order the host waits for counts
    once per layer, however many micro-batches there are."""
    for rank, result in enumerate(engine_results[case]):
        layers = sum(case.layout.rank_of(p) == rank // case.data for p in range(1, case.layout.head))
        for step in range(STEPS):
            names = [e["name"] for e in result.events if e["args"]["step"] == step]
            assert names.count("Exchange") == (5 if case.keep == "Inputs" else 4) * layers * case.micro_batches
            assert names.count("Count") == layers * (1 if case.order == "Layered" else case.micro_batches)
            assert names.count("Route") == layers * case.micro_batches


def test_experts_are_fetched_and_reduced_equally_often_with_more_micro_batches(
    engine_results: dict[Case, list[Result]],
) -> None:
    few, many = (engine_results[case] for case in COUNTED[:2])
    for one, other in zip(few, many, strict=True):
        assert {k: v for k, v in one.moved[0].items() if k != "experts"} == {
            k: v for k, v in other.moved[0].items() if k != "experts"
        }
        for name in ("Fetch", "Reduce", "Update"):
            counts = [sum(e["name"] == name for e in result.events) for result in (one, other)]
            assert counts[0] == counts[1] > 0

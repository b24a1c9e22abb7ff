"""Streamed groups of experts, against the plain reference, and against the same run without groups."""

import json
from dataclasses import replace
from typing import Any

import pytest
from pseudoreal_trainer.plan.parts import units_of_rank
from pseudoreal_trainer.plan.units import units_of
from torch import Tensor

from tests.unit.trainer.engine.support import reference
from tests.unit.trainer.engine.support.agreement import assert_trained_alike
from tests.unit.trainer.engine.support.cases import EIGHT_IN_BALANCE, Case
from tests.unit.trainer.engine.support.running import Result, sound, want

FEW = json.dumps({"experts": {"count": 8, "prototypes": 2, "capacityFactor": "0.5"}})
"""Half of all choices are refused."""

ALONE = [
    *(Case(experts=4, expert_groups=2, homes=h, micro_batches=n) for h, n in (("h", 1), ("hDd", 3), ("d", 2))),
    Case(experts=6, prototypes=3, expert_groups=3, homes="D", window=1),
    Case(experts=6, prototypes=3, expert_groups=3, homes="D", keep="All"),
    Case(options="Mixtral", expert_groups=2, homes="hD", keep="Products"),
    Case(drawn=EIGHT_IN_BALANCE, expert_groups=4, homes="h", window=1, clipping="Global", stash=True),
    Case(options="Mixtral", expert_groups=2, homes="D", window=1, blocks=2),
    Case(experts=4, prototypes=2, expert_groups=4, homes="hD", part="Experts", blocks=1, documents=True),
    Case(pipeline=1, experts=4, expert_groups=2, homes="h", blocks=2, next_sharing=(4, "Cycle")),
]
TOGETHER = [
    *(Case(data=2, expert_ranks=e, drawn=FEW, expert_groups=4 // e, homes="hD", window=1) for e in (1, 2)),
    *(Case(data=2, experts=4, expert_groups=2, sharding=s, homes="dhD") for s in ("None", "Optimizer", "Full")),
    Case(data=2, expert_ranks=2, drawn=EIGHT_IN_BALANCE, expert_groups=2, homes="hD", keep="All", clipping="Global"),
    Case(data=2, expert_ranks=2, experts=4, expert_groups=2, part="Experts", blocks=1, homes="D", window=1),
    Case(pipeline=2, options="Mixtral", expert_groups=2, homes="h", window=1, clipping="Global"),
]
FOUR_RANKS = [
    Case(data=4, expert_ranks=2, replicas=2, drawn=EIGHT_IN_BALANCE, expert_groups=2, sharding="Full", homes="d"),
    Case(data=4, expert_ranks=2, experts=8, prototypes=2, expert_groups=4, sharding="Full", homes="hD", window=1),
    Case(pipeline=2, data=2, expert_ranks=2, drawn=FEW, expert_groups=2, blocks=1, homes="D", clipping="Global"),
]
CLOSE = [*ALONE, *TOGETHER, *FOUR_RANKS]
want(CLOSE)

MANY = json.dumps({"experts": {"type": "TopK", "count": 64, "topK": {"perToken": 1, "size": 16}}})
"""Most groups of two experts get no token in a micro-batch of 24. The experts' width is a multiple of the processor's
vectors, so that no bit depends on which experts compute together."""


def _experts_on_host(groups: int, **fields: Any) -> Case:
    """Return a case with one layer of 64 experts over two ranks, and room for one of its units."""
    homes = "dd" + "h" * groups + "d"
    case = Case(layers=1, micro_batches=2, drawn=MANY, expert_ranks=2, expert_groups=groups, homes=homes, window=1)
    return replace(case, **fields)


OFTEN = [
    _experts_on_host(16, data=2),
    _experts_on_host(16, data=2, micro_batches=1, keep="All"),
    _experts_on_host(16, data=4, sharding="Full"),
    _experts_on_host(16, data=4, replicas=2, sharding="Optimizer"),
    _experts_on_host(16, data=4),
]
WITHOUT = {case: replace(case, expert_groups=1, homes="ddhd") for case in OFTEN[:2]}
want([*OFTEN, *WITHOUT.values()], events=True)


@pytest.mark.parametrize("case", CLOSE, ids=lambda case: case.name)
def test_training_with_expert_groups_equals_the_reference(case: Case, engine_results: dict[Case, list[Result]]) -> None:
    assert_trained_alike(sound(engine_results, case), case)


@pytest.mark.parametrize("case", CLOSE[::3], ids=lambda case: case.name)
def test_evaluation_with_expert_groups_equals_the_reference(
    case: Case, engine_results: dict[Case, list[Result]]
) -> None:
    expected = reference.evaluate(case, sound(engine_results, case).weights)
    assert sum(result.evaluation for result in engine_results[case]) == pytest.approx(expected, rel=1e-12)


def _chosen(case: Case) -> list[set[int]]:
    """Return, for each data rank, the experts that its tokens choose in the first step, from the choices of a plain
    model."""
    model, _ = reference.model_and_optimizer(case)
    found: list[set[int]] = []
    for source in range(case.data):
        logits: list[Tensor] = []
        router = model.blocks[0].get_submodule("router")
        hook = router.register_forward_hook(lambda *args, kept=logits: kept.append(args[-1]))
        for windows in reference.part_of(reference.batch_of(case, 0), source, case.data):
            model(windows[:, :-1])
        hook.remove()
        found.append({expert for each in logits for expert in each.argmax(dim=-1).flatten().tolist()})
    return found


def _groups_with_tokens(case: Case, rank: int) -> set[int]:
    """Return the groups of this rank's experts that receive tokens from its expert group, or from any rank if states
    are sharded."""
    first = rank - rank % case.expert_ranks
    own = range(first, first + case.expert_ranks) if case.sharding == "None" else range(case.data)
    experts = set().union(*(chosen for source, chosen in enumerate(_chosen(case)) if source in own))
    of_each = 64 // case.expert_ranks
    of_group, begin = of_each // case.expert_groups, rank % case.expert_ranks * of_each
    return {(expert - begin) // of_group for expert in experts if begin <= expert < begin + of_each}


@pytest.mark.parametrize("case", OFTEN, ids=lambda case: case.name)
def test_an_expert_group_is_fetched_twice_if_it_has_tokens_and_otherwise_never(
    case: Case, engine_results: dict[Case, list[Result]]
) -> None:
    """The bytes over the bus are those of groups with tokens, and no others."""
    for rank, result in enumerate(engine_results[case]):
        hit = _groups_with_tokens(case, rank)
        assert 0 < len(hit) < case.expert_groups, "some groups get tokens, others do not"
        events = [event for event in result.events if event["args"]["step"] == 0 and event["name"] == "Fetch"]
        experts = [event["args"]["unit"] for event in events if case.layout.pool_of(event["args"]["unit"]) == "Experts"]
        assert sorted(experts) == sorted(2 * [2 + group for group in hit])
        group = units_of_rank(case.layout, units_of(case.model, case.sharing), rank)[2]
        parts = case.layout.shards(2)
        assert result.moved[0]["h2d"] == 2 * len(hit) * group.shard_length(parts) * 8


@pytest.mark.processor_deep
@pytest.mark.parametrize("case", WITHOUT, ids=lambda case: case.name)
def test_skipped_fetches_change_no_bit(case: Case, engine_results: dict[Case, list[Result]]) -> None:
    found, whole = engine_results[case][0], engine_results[WITHOUT[case]][0]
    assert found.losses == whole.losses
    assert found.weights.keys() == whole.weights.keys()
    assert all(found.weights[name].equal(weights) for name, weights in whole.weights.items())
    assert all(found.first_moments[name].equal(moments) for name, moments in whole.first_moments.items())

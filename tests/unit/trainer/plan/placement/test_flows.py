"""Flows against the bytes that each rank sends, and bytes_between bytes against the best of all ring orders."""

import random
from collections import Counter
from dataclasses import replace

from pseudoreal_trainer.plan.effects import traffic_bytes
from pseudoreal_trainer.plan.lower import step_plan
from pseudoreal_trainer.plan.parts import units_of_rank
from pseudoreal_trainer.plan.placement.flows import bytes_between, flows_of

from tests.unit.trainer.plan.placement.support.clusters import counted, job, jobs, somewhere
from tests.unit.trainer.plan.support.cases import make_layout, make_sizes


def test_flows_of_a_rank_add_up_to_its_traffic() -> None:
    """The sums of a rank's flows equal `traffic_bytes`, which other tests compare with the engine's counters."""
    for each in jobs(4):
        plan, flows = step_plan(each.layout), each.flows
        for rank in range(each.layout.mesh.ranks):
            sent: Counter[str] = Counter()
            for flow in flows:
                sent[flow.exchange] += flow.bytes * (rank in flow.ranks)
            records = plan[each.layout.mesh.coordinates(rank).pipeline]
            expected = traffic_bytes(each.layout, each.sizes, records)
            assert sent["shards"] == expected["collective"]
            assert (sent["replicas"], sent["pipeline"]) == (expected["replicas"], expected["pipeline"])


def test_a_ring_enters_each_place_once() -> None:
    chance = random.Random(0)
    for each in jobs(4):
        if each.layout.mesh.ranks > 6:
            continue
        order = chance.sample(range(each.workers), each.workers)
        places = each.of_ranks(order, somewhere(each.workers, chance))
        expected = counted(each, places)
        assert bytes_between(each.flows, places) == {name: expected[name] for name in bytes_between([], [])}


def test_flows_within_one_place_cross_nothing() -> None:
    each = job(4, 2, sharding="Full")
    assert set(bytes_between(each.flows, ["here"] * 4).values()) == {0}
    apart = bytes_between(each.flows, ["a", "a", "b", "b"])
    assert (apart["shards"], apart["replicas"]) == (0, 0)
    assert apart["pipeline"] == sum(flow.bytes * 2 for flow in each.flows if flow.exchange == "pipeline")


def test_tokens_go_to_the_experts_of_other_ranks() -> None:
    """Four data ranks with two expert ranks: ranks (0, 1) and (2, 3) exchange tokens; ranks (0, 2) and (1, 3) hold the
    same experts."""
    layers, experts = 2, {"count": 4, "prototypes": 2}
    layout = make_layout(
        layers, 1, data=4, layer_experts=(0, 1), expert_ranks=2, sharding="Full", replicas=1, clipping="Global"
    )
    whole = make_sizes(layers, experts=experts)
    sizes = replace(whole, units=units_of_rank(layout, whole.units, 0))
    plan = step_plan(layout)
    flows, (records,) = flows_of(layout, sizes, plan), plan
    expected = traffic_bytes(layout, sizes, records)
    assert {flow.ranks for flow in flows if flow.exchange == "experts"} == {(0, 1), (2, 3)}
    assert {flow.ranks for flow in flows if flow.exchange == "shards"} == {(0, 1, 2, 3), (0, 2), (1, 3)}
    for rank in range(4):
        sent: Counter[str] = Counter()
        for flow in flows:
            sent[flow.exchange] += flow.bytes * (rank in flow.ranks)
        assert sent["experts"] == expected["experts"] > 0
        assert sent["shards"] == expected["collective"] > 0

"""Flows against the bytes that each rank sends, and what crosses between places against rings in every order."""

import random
from collections import Counter

from pseudoreal_trainer.forecast.placement.flows import crossing
from pseudoreal_trainer.forecast.time.traffic import traffic_bytes
from pseudoreal_trainer.plan.lower import step_plan

from tests.unit.trainer.forecast.placement.clusters import counted, job, jobs, somewhere


def test_a_rank_sends_what_its_flows_say() -> None:
    """The sums over the flows of a rank are those that the engine counts, whose tests are others."""
    for each in jobs(4):
        plan, flows = step_plan(each.layout), each.flows
        for rank in range(each.layout.mesh.ranks):
            sent: Counter[str] = Counter()
            for flow in flows:
                sent[flow.exchange] += flow.bytes * (rank in flow.ranks)
            records = plan[each.layout.mesh.coordinates(rank).pipeline]
            expected = traffic_bytes(each.layout, each.sizes, records)
            assert sent["shards"] + sent["ties"] == expected["collective"]
            assert (sent["replicas"], sent["pipeline"]) == (expected["replicas"], expected["pipeline"])


def test_a_ring_enters_each_place_once() -> None:
    chance = random.Random(0)
    for each in jobs(4):
        if each.layout.mesh.ranks > 6:
            continue
        order = chance.sample(range(each.workers), each.workers)
        places = each.of_ranks(order, somewhere(each.workers, chance))
        expected = counted(each, places)
        assert crossing(each.flows, places) == {name: expected[name] for name in crossing([], [])}


def test_what_is_in_one_place_crosses_nothing() -> None:
    each = job(4, 2, sharding="Full")
    assert set(crossing(each.flows, ["here"] * 4).values()) == {0}
    apart = crossing(each.flows, ["a", "a", "b", "b"])
    assert (apart["shards"], apart["replicas"], apart["ties"]) == (0, 0, 0)
    assert apart["pipeline"] == sum(flow.bytes * 2 for flow in each.flows if flow.exchange == "pipeline")

"""The chosen order of workers against all orders of small clusters."""

from collections.abc import Sequence
from itertools import permutations

import pytest
from pseudoreal_trainer.plan.placement import order as module
from pseudoreal_trainer.plan.placement.flows import bytes_between
from pseudoreal_trainer.plan.placement.order import Place, worker_order

from tests.support.depth import DEPTH
from tests.unit.trainer.plan.placement.support.clusters import Job, counted, job, jobs, somewhere


def found(each: Job, places: Sequence[Place]) -> tuple[int, ...]:
    return worker_order(places, each.layout.mesh, each.flows)


def cost(each: Job, order: Sequence[int], places: Sequence[Place]) -> tuple[int, int]:
    """Return the bytes that cross between domains, and between nodes."""
    of_ranks, flows = each.of_ranks(order, places), each.flows
    domains = [place.domain for place in of_ranks]
    return sum(bytes_between(flows, domains).values()), sum(bytes_between(flows, of_ranks).values())


def least(each: Job, places: Sequence[Place]) -> tuple[int, int]:
    """Return the lowest cost of all orders that start with worker 0."""
    return min(cost(each, (0, *others), places) for others in permutations(range(1, each.workers)))


def test_worker_order_of_a_small_cluster_has_the_least_traffic_of_all_orders() -> None:
    """All meshes of up to six workers, in randomly drawn places."""
    chance = DEPTH.chance("orders")
    for each in jobs(6):
        for _ in range(DEPTH.of(2, 50)):
            places = somewhere(each.workers, chance)
            order = found(each, places)
            assert sorted(order) == [*range(each.workers)]
            assert order[0] == 0
            assert cost(each, order, places) == least(each, places)


def test_worker_order_has_the_least_traffic_counted_message_by_message() -> None:
    chance = DEPTH.chance("messages")
    for each in (job(4, 2, sharding="Full"), job(4, 4), job(4, 4, shared=True), job(4, replicas=2, sharding="Full")):
        places = somewhere(4, chance)

        def total(order: Sequence[int], each: Job = each, places: Sequence[Place] = places) -> tuple[int, int]:
            of_ranks = each.of_ranks(order, places)
            return counted(each, [place.domain for place in of_ranks]).total(), counted(each, of_ranks).total()

        assert total(found(each, places)) == min(total((0, *others)) for others in permutations((1, 2, 3)))


def test_search_among_many_workers_is_nearly_optimal(monkeypatch: pytest.MonkeyPatch) -> None:
    """The heuristic search is forced where all orders can be tried: at most one in a hundred results misses the best
    order."""
    monkeypatch.setattr(module, "_MOST_TRIED", 0)
    chance, missed = DEPTH.chance("search"), 0
    tries = DEPTH.of(500, 5000)
    for each in chance.choices([*jobs(6)], k=tries):
        places = somewhere(each.workers, chance)
        best, reached = least(each, places), cost(each, found(each, places), places)
        assert reached[0] == best[0], "between domains nothing is missed"
        missed += reached != best
    assert missed <= tries // 100


def test_only_messages_of_the_pipeline_cross_between_racks() -> None:
    """Sixteen workers are spread over two racks and eight nodes, and consecutive workers are on different nodes. In the
    chosen order each rack becomes a pipeline rank, and each node a replica."""
    each = job(16, 2, per_worker=2, sharding="Full", replicas=4)
    places = [Place(f"rack-{n % 2}", f"node-{n % 8}") for n in range(16)]
    of_ranks = each.of_ranks(found(each, places), places)
    racks = bytes_between(each.flows, [place.domain for place in of_ranks])
    assert {exchange for exchange, size in racks.items() if size} == {"pipeline"}
    nodes = bytes_between(each.flows, of_ranks)
    assert {exchange for exchange, size in nodes.items() if size} == {"pipeline", "replicas"}
    by_number = bytes_between(each.flows, each.of_ranks(range(16), places))
    assert by_number["shards"] > 0


def test_workers_keep_their_numbers_if_no_order_has_less_traffic() -> None:
    each = job(6, 2, sharding="Full")
    for places in ([Place("", "node")] * 6, [Place("", f"node-{n}") for n in range(6)]):
        assert found(each, places) == (0, 1, 2, 3, 4, 5)


def test_worker_order_considers_nodes_alone_if_domains_are_unknown() -> None:
    each = job(4, 2, sharding="Full")
    assert found(each, [Place("", "a"), Place("", "b"), Place("", "a"), Place("", "b")]) == (0, 2, 1, 3)


def test_thousands_of_workers_are_ordered_domain_by_domain() -> None:
    each = job(2000, 4, sharding="Full", replicas=20)
    places = [Place(f"rack-{n % 4}", f"node-{n}") for n in range(2000)]
    order = found(each, places)
    assert sorted(order) == [*range(2000)]
    racks = bytes_between(each.flows, [places[worker].domain for worker in order])
    assert [exchange for exchange, size in racks.items() if size] == ["replicas"], "replicas exchange the fewest bytes"
    assert racks["replicas"] < bytes_between(each.flows, [place.domain for place in places])["shards"]

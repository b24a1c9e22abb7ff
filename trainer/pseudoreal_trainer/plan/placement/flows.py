"""Traffic matrix of a step, from its plan. Pure."""

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, combinations
from typing import Literal, get_args

from pseudoreal_trainer.plan.layout import Layout, Pool, Users
from pseudoreal_trainer.plan.mesh import Groups
from pseudoreal_trainer.plan.records import Count, Fetch, Plan, RankPlan, Reduce, Send, SumChoices
from pseudoreal_trainer.plan.sizes import Sizes
from pseudoreal_trainer.plan.traffic import agreed, moved, traffic_bytes

Exchange = Literal["pipeline", "shards", "replicas", "experts"]
"""Kind of traffic.

- pipeline: messages between pipeline ranks
- shards: gathers and sums of the shards of a replica, or of whole gradients, on all pipeline ranks that use a unit
- replicas: the same between replicas
- experts: tokens on their way to experts on other ranks and back
"""
EXCHANGES: tuple[Exchange, ...] = get_args(Exchange)


@dataclass(frozen=True)
class Flow:
    """Ranks that exchange bytes in each step, as a ring: the algorithm of NCCL and gloo, and trivially true of two
    ranks."""

    exchange: Exchange
    ranks: tuple[int, ...]
    bytes: int
    """Bytes that each rank sends to the next."""


def flows_of(layout: Layout, sizes: Sizes, plan: Plan) -> list[Flow]:
    """Return all flows of a step that have bytes. `plan`: the plan of each pipeline rank."""
    of_ranks = (_of_pipeline_rank(layout, sizes, rank, records) for rank, records in enumerate(plan))
    made = chain(_messages(layout, sizes, plan), _of_users(layout, sizes, plan), *of_ranks)
    return [flow for flow in made if flow.bytes]


def bytes_between(flows: Iterable[Flow], places: Sequence[Hashable]) -> dict[Exchange, int]:
    """Return the bytes per step between different places, for each kind of traffic. `places`: place of each rank.

    A ring enters each place once: ranks of one place are neighbours in the ring wherever possible.
    """
    total: Counter[Exchange] = Counter()
    for flow in flows:
        entered = len({places[rank] for rank in flow.ranks})
        total[flow.exchange] += flow.bytes * entered if entered > 1 else 0
    return {exchange: total[exchange] for exchange in EXCHANGES}


def _of_users(layout: Layout, sizes: Sizes, plan: Plan) -> Iterator[Flow]:
    """Yield the flows among the ranks of a replica that use a unit. All of them have the same records of the unit."""
    sent: Counter[tuple[Pool, Users]] = Counter()
    for pipeline_rank, records in enumerate(plan):
        for record in records:
            if isinstance(record, Fetch | Reduce) and layout.users[record.unit][0] == pipeline_rank:
                key = layout.pool_of(record.unit), layout.users[record.unit]
                sent[key] += moved(layout, sizes, record)["collective"]
    for (pool, users), size in sent.items():
        for ranks in layout.groups_of_replica(pool, users):
            yield Flow("shards", ranks, size)


def _of_pipeline_rank(layout: Layout, sizes: Sizes, pipeline_rank: int, records: RankPlan) -> Iterator[Flow]:
    """Yield the flows between the replicas of a pipeline rank, and between its ranks with different experts."""
    mesh, together = layout.mesh, traffic_bytes(layout, sizes, records)
    summed = sum(moved(layout, sizes, record)["collective"] for record in records if isinstance(record, SumChoices))
    told = sum(agreed(layout, record.position) for record in records if isinstance(record, Count))

    def here(groups: Groups) -> Iterator[tuple[int, ...]]:
        return (ranks for ranks in groups if mesh.coordinates(ranks[0]).pipeline == pipeline_rank)

    for ranks in here(mesh.data_groups):
        yield Flow("shards", ranks, summed)
    for ranks in here(mesh.groups("replica")):
        yield Flow("replicas", ranks, together["replicas"])
    for ranks in here(mesh.expert_groups("expert")):
        # All-to-all: each rank sends the same number of bytes to every other rank.
        for pair in combinations(ranks, 2):
            yield Flow("experts", pair, (together["experts"] - told) // (len(ranks) - 1))
    if told:
        for ranks in here(mesh.expert_groups("replica", "expert_shard")):
            yield Flow("experts", ranks, told)


def _messages(layout: Layout, sizes: Sizes, plan: Plan) -> Iterator[Flow]:
    """Yield the flows between pipeline ranks. Each activation is answered by a gradient of the same size, so both ends
    send equally much."""
    sent: Counter[tuple[int, int]] = Counter()
    for pipeline_rank, records in enumerate(plan):
        for record in records:
            if isinstance(record, Send):
                low, high = sorted((pipeline_rank, record.peer))
                sent[low, high] += moved(layout, sizes, record)["pipeline"]
    for column in layout.mesh.groups("pipeline"):
        for (low, high), size in sent.items():
            yield Flow("pipeline", (column[low], column[high]), size // 2)

"""Traffic matrix of a step, from its plan. Pure."""

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal, assert_never, get_args

from pseudoreal_trainer.plan.effects import Group, transfers_of
from pseudoreal_trainer.plan.layout import Layout
from pseudoreal_trainer.plan.mesh import Groups
from pseudoreal_trainer.plan.records import Plan
from pseudoreal_trainer.plan.sizes import Sizes

Exchange = Literal["pipeline", "shards", "replicas", "experts", "context", "tensor"]
"""Kind of traffic.

- pipeline: messages between pipeline ranks
- shards: gathers and sums of the shards of a replica, or of whole gradients, on all pipeline ranks of a unit; and sums
  of the choices of each expert
- replicas: gathers and sums between replicas
- experts: tokens on their way to experts on other ranks and back, and sums of row counts
- context: keys and values, and their gradients, between context ranks
- tensor: tokens and outputs of layers, and their gradients, between tensor ranks
"""
EXCHANGES: tuple[Exchange, ...] = get_args(Exchange)


@dataclass(frozen=True)
class Flow:
    """A ring of ranks that exchange bytes in each step. NCCL and gloo use rings, and two ranks always form a ring."""

    exchange: Exchange
    ranks: tuple[int, ...]
    bytes: int
    """Bytes that each rank sends to the next."""


def flows_of(layout: Layout, sizes: Sizes, plan: Plan) -> list[Flow]:
    """Return all flows of a step that have bytes. `plan`: the plan of each pipeline rank."""
    flows: list[Flow] = []
    for pipeline_rank, records in enumerate(plan):
        sent: Counter[Group] = Counter()
        for record in records:
            for transfer in transfers_of(layout, sizes, record):
                if transfer.group is not None:
                    sent[transfer.group] += transfer.size
        for group, size in sent.items():
            flows += _flows_of_group(layout, pipeline_rank, group, size)
    return [flow for flow in flows if flow.bytes]


def bytes_between(flows: Iterable[Flow], places: Sequence[Hashable]) -> dict[Exchange, int]:
    """Return kind of traffic -> bytes per step between different places. `places`: place of each rank.

    A ring is assumed to enter each place once: ranks of one place are neighbours in the ring wherever possible.
    """
    total: Counter[Exchange] = Counter()
    for flow in flows:
        entered = len({places[rank] for rank in flow.ranks})
        total[flow.exchange] += flow.bytes * entered if entered > 1 else 0
    return {exchange: total[exchange] for exchange in EXCHANGES}


def _flows_of_group(layout: Layout, pipeline_rank: int, group: Group, size: int) -> Iterator[Flow]:
    """Yield the flows of all groups of one kind that contain ranks of a pipeline rank. `size`: bytes that each rank
    sends in its group."""
    mesh = layout.mesh

    def here(groups: Groups) -> Iterator[tuple[int, ...]]:
        return (ranks for ranks in groups if mesh.coordinates(ranks[0]).pipeline == pipeline_rank)

    match group.kind:
        case "holders":
            # All users have the same records of the unit. To count them once, only the first user yields flows.
            if group.users[0] == pipeline_rank:
                for ranks in layout.groups_of_replica(group.fold, group.users):
                    yield Flow("shards", ranks, size)
        case "data":
            for ranks in here(mesh.data_groups):
                yield Flow("shards", ranks, size)
        case "replicas":
            for ranks in here(mesh.groups("replica")):
                yield Flow("replicas", ranks, size)
        case "experts":
            for ranks in here(mesh.expert_groups("expert")):
                # All-to-all: each rank sends the same number of bytes to every other rank.
                for pair in combinations(ranks, 2):
                    yield Flow("experts", pair, size // (len(ranks) - 1))
        case "same experts":
            for ranks in here(mesh.expert_groups("replica", "expert_shard")):
                yield Flow("experts", ranks, size)
        case "context":
            for ranks in here(mesh.context_groups):
                yield Flow("context", ranks, size)
        case "tensor":
            for ranks in here(mesh.tensor_groups):
                yield Flow("tensor", ranks, size)
        case "peer":
            # For each activation a gradient of the same size is sent back, so both ranks send the same number of bytes.
            (peer,) = group.users
            if pipeline_rank < peer:
                for column in mesh.groups("pipeline"):
                    yield Flow("pipeline", (column[pipeline_rank], column[peer]), size)
        case _:
            assert_never(group.kind)

"""Coordinates and process groups of one rank: the ranks it communicates with, and the thread that uses each group."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from pseudoreal_trainer.accelerator.adapters import adapter_of
from pseudoreal_trainer.engine.ranks.ranks import Ranks
from pseudoreal_trainer.plan.layout import Layout, Users
from pseudoreal_trainer.plan.mesh import Fold, Groups
from pseudoreal_trainer.plan.records import Flow

Group = dist.ProcessGroup
Channel = tuple[Flow, int, int]
"""Flow, source and target; both are pipeline ranks."""
_Name = TypeVar("_Name")


@dataclass(frozen=True)
class UnitGroups:
    """Groups of the ranks that hold a unit, from the point of view of one of them.

    A sharded unit is cut into one part per holder; no two holders keep the same part. Collectives are hierarchical, so
    that most bytes stay inside a replica (for instance a node): gradients are reduce-scattered within the replica, then
    across replicas; weights are all-gathered across replicas, then within the replica. Ranks of `inter` hold adjacent
    parts, so both stages work on contiguous memory. An unsharded gradient is all-reduced over `intra`. A group of one
    rank is None, and its stage is skipped.
    """

    rank_in_replica: int = 0
    """Index of this rank among the holders in its replica."""
    replica_size: int = 1
    """Number of holders in each replica."""
    intra: Group | None = None
    """Holders in this replica. Main thread: all-gathers and the first stage of reductions."""
    inter: Group | None = None
    """Holders with this `rank_in_replica`, one per replica. Main thread: all-gathers."""
    inter_reduce: Group | None = None
    """The same ranks as `inter`. Reduction thread: second stage of reductions."""

    def inter_slice(self, flat: Tensor) -> Tensor:
        """Return the inter-replica slice of a vector: a view of the parts that the ranks of `inter` hold together,
        [replicas * length]."""
        return flat.view(self.replica_size, -1)[self.rank_in_replica]


@dataclass(frozen=True)
class ProcessGroups:
    """Coordinates and groups of this rank; created once per phase.

    Groups of one rank are None. While a step runs, each group is used by one thread: two threads on one group could
    issue collectives in different orders on different ranks. All groups but `checkpoint` use the device's backend: NCCL
    on GPUs, gloo on CPUs.
    """

    layout: Layout
    ranks: Ranks
    of_units: Mapping[tuple[Fold, Users], UnitGroups] = field(default_factory=dict)
    """(fold, users) -> groups of the ranks that hold units of this fold with these users. Empty if there is one
    rank."""
    expert: Group | None = None
    """Ranks of this replica that together have all experts of a layer. Main thread: exchanges of tokens."""
    context: Group | None = None
    """Ranks with the same sequences, each with a part of each sequence. Main thread: gathers of keys and values."""
    tensor: Group | None = None
    """Ranks with slices of the same matrices. Main thread: gathers of tokens, sums of outputs, and sums of the
    gradients of replicated tensors."""
    same_experts: Group | None = None
    """Ranks with the same experts, if experts are cut into groups. Main thread: agreement on which groups to fetch."""
    reduce_world: Group | None = None
    """All ranks. Reduction thread: agreements on a step."""
    reduce_users: Mapping[Users, Group | None] = field(default_factory=dict)
    """All ranks of the pipeline ranks that use a unit. Reduction thread: norm of one unit. Empty if there is one
    rank."""
    checkpoint: Group | None = None
    """All ranks, with gloo. Checkpoint thread."""
    probe: Group | None = None
    """Pipeline ranks of this data rank, if gradients of layers are measured. Main thread: messages and sums of the
    probe."""
    router_counts: Group | None = None
    """Data ranks of this pipeline rank. Main thread: sums of how often each expert was chosen in the step."""
    p2p: Mapping[Channel, Group | None] = field(default_factory=dict)
    """One group per directed channel to or from another pipeline rank; GPUs only. Main thread.

    NCCL ignores tags and runs the operations of a group in order: on a shared group, one pending receive would block
    every later message. A rank has at most four channels: from its two neighbours and to them.
    """

    @property
    def pipeline_rank(self) -> int:
        return self.layout.mesh.coordinates(self.ranks.rank).pipeline

    @property
    def data_rank(self) -> int:
        return self.layout.mesh.data_rank(self.ranks.rank)

    @property
    def sequence_group(self) -> int:
        return self.layout.mesh.sequence_group(self.ranks.rank)

    @property
    def sequence_coordinate(self) -> int:
        return self.layout.mesh.sequence_coordinate(self.ranks.rank)

    @property
    def tensor_rank(self) -> int:
        return self.layout.mesh.tensor_coordinate(self.ranks.rank)

    def part(self, unit: int) -> int:
        """Return the index of this rank's shard of a unit, if states are sharded."""
        return self.layout.part(unit, self.ranks.rank)

    def unit_groups(self, unit: int) -> UnitGroups:
        return self._unit_groups(unit, self.layout.users[unit])

    def data_unit_groups(self, unit: int) -> UnitGroups:
        """Return the unit's groups restricted to this pipeline rank."""
        return self._unit_groups(unit, (self.pipeline_rank,))

    def _unit_groups(self, unit: int, users: Users) -> UnitGroups:
        return self.of_units.get((self.layout.fold_of(unit), users), UnitGroups())

    def reduce_users_of(self, unit: int) -> Group | None:
        return self.reduce_users.get(self.layout.users[unit])

    @property
    def device(self) -> torch.device:
        return self.ranks.device

    def world_rank(self, pipeline_rank: int) -> int:
        """Return the world rank with this pipeline rank and the other coordinates of this rank."""
        return self.layout.mesh.at_pipeline(self.ranks.rank, pipeline_rank)

    def close(self) -> None:
        """Destroy all groups of this rank."""
        of_units = [group for one in self.of_units.values() for group in (one.intra, one.inter, one.inter_reduce)]
        single = [self.expert, self.same_experts, self.context, self.tensor, self.probe, self.router_counts]
        of_all = [self.reduce_world, self.checkpoint]
        # Units share some groups: destroy each group once.
        for group in dict.fromkeys([*of_units, *single, *of_all, *self.reduce_users.values(), *self.p2p.values()]):
            if group is not None:
                dist.destroy_process_group(group)


def create_process_groups(layout: Layout, ranks: Ranks) -> ProcessGroups:
    """Create the groups of this rank. Collective: all ranks create the groups in one order."""
    assert layout.mesh.ranks == ranks.world, "the layout covers all ranks"
    if ranks.world == 1:
        return ProcessGroups(layout, ranks)
    with ranks.heartbeat.waiting("makes groups of ranks"):
        groups = _create(layout, ranks)
        _connect_channels(groups)
        return groups


def _create(layout: Layout, ranks: Ranks) -> ProcessGroups:
    """Return the groups of this rank, without connections.

    On GPUs the number of torch calls of a rank does not depend on the number of ranks: it is a constant, plus two calls
    for each set of pipeline ranks that share a block. On CPUs, where a call costs nothing, each rank calls torch once
    per group.
    """
    maker = _GroupMaker(ranks)
    columns = [*map(list, layout.mesh.groups("pipeline"))]
    world = [list(range(ranks.world))]
    same_experts = [*map(list, layout.mesh.expert_groups("replica", "expert_shard"))]
    return ProcessGroups(
        layout,
        ranks,
        of_units=_unit_groups(layout, maker),
        expert=maker.own_group([*map(list, layout.mesh.expert_groups("expert"))]),
        same_experts=maker.own_group(same_experts) if layout.expert_groups > 1 else None,
        context=maker.own_group([*map(list, layout.mesh.context_groups)]),
        tensor=maker.own_group([*map(list, layout.mesh.tensor_groups)]),
        reduce_world=maker.own_group(world),
        reduce_users=_reduce_users(layout, maker),
        checkpoint=maker.own_gloo_group(world),
        probe=maker.own_group(columns) if layout.measures else None,
        router_counts=maker.own_group([*map(list, layout.mesh.data_groups)]) if layout.balances_steps else None,
        p2p=_channels(layout, maker) if maker.on_gpus else {},
    )


def _unit_groups(layout: Layout, maker: "_GroupMaker") -> dict[tuple[Fold, Users], UnitGroups]:
    # All units use the same groups across replicas, so create these groups once.
    replicas = [*map(list, layout.mesh.groups("replica"))]
    inter, inter_reduce = maker.own_group(replicas), maker.own_group(replicas)
    found: dict[tuple[Fold, Users], UnitGroups] = {}
    for fold in layout.folds:
        groups = partial(layout.groups_of_replica, fold)
        for users, intra in _own_group_of_each(layout, maker, _sets_of_users(layout, [fold]), groups).items():
            (mine,) = (ranks for ranks in groups(users) if maker.ranks.rank in ranks)
            found[fold, users] = UnitGroups(mine.index(maker.ranks.rank), len(mine), intra, inter, inter_reduce)
    return found


def _reduce_users(layout: Layout, maker: "_GroupMaker") -> dict[Users, Group | None]:
    return _own_group_of_each(
        layout,
        maker,
        _sets_of_users(layout, layout.folds),
        partial(layout.mesh.at_each_pipeline, layout.mesh.data_groups),
    )


def _sets_of_users(layout: Layout, folds: Sequence[Fold]) -> dict[Users, Users]:
    """Return the sets of pipeline ranks that share a unit of these folds, and a set with each single pipeline rank, for
    measuring its layers. Each set is its own key."""
    alone = ((rank,) for rank in range(layout.pipeline))
    common = {
        layout.users[unit] for unit in filter(layout.is_common, range(layout.units)) if layout.fold_of(unit) in folds
    }
    return {users: users for users in (*alone, *sorted(common))}


@dataclass(frozen=True)
class _GroupMaker:
    """Creates groups. Every rank makes the same calls in the same order; each call returns this rank's group."""

    ranks: Ranks

    @property
    def on_gpus(self) -> bool:
        return self.ranks.device.type != "cpu"

    def own_group(self, members: list[list[int]]) -> Group | None:
        """Return this rank's group on the device's backend; `members` are disjoint sets of ranks. None for a rank that
        is alone in its set, or in none."""
        if not self.on_gpus:
            return self.own_gloo_group(members)
        several = [one for one in members if len(one) > 1]
        return _own(adapter_of(self.ranks.device).split_group(several, self.ranks.limit)) if several else None

    def own_gloo_group(self, members: list[list[int]]) -> Group | None:
        """Return this rank's gloo group; `members` are disjoint sets of ranks. One collective call per set."""
        made = [dist.new_group(one, backend="gloo", timeout=self.ranks.limit) for one in members if len(one) > 1]
        return next(filter(None, map(_own, made)), None)


def _own(group: object) -> Group | None:
    """Return the group, or None if this rank is not a member: torch then returns a number."""
    return group if isinstance(group, Group) else None


def _channels(layout: Layout, maker: _GroupMaker) -> dict[Channel, Group | None]:
    hops = {(layout.rank_of(p), layout.rank_of(p + 1)) for p in range(layout.head)}
    pairs: dict[Channel, tuple[int, ...]] = {}
    for source, target in sorted(hop for hop in hops if hop[0] != hop[1]):
        pairs[Flow.ACTIVATION, source, target] = (source, target)
        pairs[Flow.GRADIENT, target, source] = (source, target)
    # Each channel has one pair of ranks per data rank.
    return _own_group_of_each(layout, maker, pairs, partial(layout.mesh.at_each_pipeline, layout.mesh.groups()))


def _own_group_of_each(
    layout: Layout, maker: _GroupMaker, sets: Mapping[_Name, Users], groups: Callable[[Users], Groups]
) -> dict[_Name, Group | None]:
    """Return name -> this rank's group, for each set that contains this rank; None: the group has no other ranks.

    `sets`: name -> pipeline ranks. `groups`: returns the groups of ranks for a set of pipeline ranks.
    """
    found: dict[_Name, Group | None] = {}
    here = layout.mesh.coordinates(maker.ranks.rank).pipeline
    for together in _rounds(sets):
        mine = maker.own_group([[*ranks] for name in together for ranks in groups(sets[name])])
        found |= {name: mine for name in together if here in sets[name]}
    return found


def _rounds(sets: Mapping[_Name, Users]) -> list[list[_Name]]:
    """Return lists of names; the sets of the names in one list are disjoint. A greedy search keeps the number of lists
    low: about five for the channels of a ring."""
    rounds: list[list[_Name]] = []
    for name, members in sets.items():
        fitting = (one for one in rounds if all(set(members).isdisjoint(sets[other]) for other in one))
        one = next(fitting, None)
        if one is None:
            rounds.append([name])
        else:
            one.append(name)
    return rounds


def _connect_channels(groups: ProcessGroups) -> None:
    """Send one element over every channel, before the first step.

    NCCL connects two ranks during their first message, and the first of the two blocks until its peer joins. During a
    step this can deadlock: the peer may need a later message of this rank first. Here all ranks walk the channels in
    one sorted order and need nothing else, so both ends of the first unconnected channel always arrive.
    """
    here = groups.pipeline_rank
    for (_, source, target), group in sorted(groups.p2p.items(), key=lambda item: (item[0][0].value, *item[0][1:])):
        element = torch.zeros(1, device=groups.device)
        transfer, peer = (dist.isend, target) if here == source else (dist.irecv, source)
        work = transfer(element, groups.world_rank(peer), group=group)
        assert work is not None, "a rank keeps only the channels that it is an end of"
        work.wait()
        # On a GPU, wait() only orders the stream; reading the value makes the host wait.
        element.item()

"""A rank's coordinates among pipeline and data ranks, and the groups of ranks that it speaks with."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from pseudoreal_trainer.engine.ranks.ranks import Ranks
from pseudoreal_trainer.plan.layout import POOLS, Layout, Pool, Users
from pseudoreal_trainer.plan.mesh import Groups
from pseudoreal_trainer.plan.records import Flow

Group = dist.ProcessGroup
Channel = tuple[Flow, int, int]
"""Flow, from, to; pipeline ranks."""
_Name = TypeVar("_Name")


@dataclass(frozen=True)
class Holders:
    """The ranks that have the same elements of a unit, as one of them sees them."""

    place: int = 0
    """Which of those of its replica this rank is."""
    places: int = 1
    """Number of those of a replica."""
    shard: Group | None = None
    """Those that are in one replica."""
    replica: Group | None = None
    """Those with this one's place in the other replicas."""
    side_replica: Group | None = None
    """The same, for the thread of reductions."""

    def neighbours(self, flat: Tensor) -> Tensor:
        """Those of a vector's equal parts that this rank and those with its place in the other replicas have: a view,
        [parts of each place]."""
        return flat.view(self.places, -1)[self.place]


@dataclass(frozen=True)
class Mesh:
    """The ranks arranged by pipeline rank and data rank, as this rank sees them.

    Groups of one rank are None. Each group belongs to one thread while a step runs: two threads that used one group
    could mix up their collectives. All but `saving` are on the device's network: NCCL on GPUs, gloo on CPUs."""

    layout: Layout
    ranks: Ranks
    holders: dict[tuple[Pool, Users], Holders] = field(default_factory=dict)
    """Who has the same elements of a unit, by who uses it: of experts the ranks with the same part of them, of other
    units all. Empty on a rank that is alone."""
    expert: Group | None = None
    """The ranks of this replica that have all experts of a layer together, for exchanges of tokens."""
    same_experts: Group | None = None
    """The ranks that have the same experts, where these come and go in groups: they agree which ones."""
    side_world: Group | None = None
    """All ranks, for the thread of reductions."""
    side_users: dict[Users, Group | None] = field(default_factory=dict)
    """All ranks of the pipeline ranks that use a unit, for the thread of reductions. Empty on a rank that is alone."""
    saving: Group | None = None
    """All ranks, on the host; belongs to the thread that saves checkpoints."""
    measuring: Group | None = None
    """The pipeline ranks of this data rank, where gradients of layers are measured."""
    choosing: Group | None = None
    """The data ranks of this pipeline rank, where choices of experts are summed over steps."""
    channels: dict[Channel, Group | None] = field(default_factory=dict)
    """A group for each channel. NCCL knows no tags and runs the operations of a group one after the other; with a group
    of its own, a message that is awaited holds up no other. A rank has at most four: from its two neighbours and to
    them."""

    @property
    def pipeline_rank(self) -> int:
        return self.layout.mesh.coordinates(self.ranks.rank).pipeline

    @property
    def data_rank(self) -> int:
        return self.layout.mesh.data_rank(self.ranks.rank)

    def part(self, unit: int) -> int:
        """Which of the equal parts of a unit this rank has, where states are sharded."""
        return self.layout.part(unit, self.ranks.rank)

    def holders_of(self, unit: int) -> Holders:
        return self._holders(unit, self.layout.users[unit])

    def data_holders_of(self, unit: int) -> Holders:
        """Those of this pipeline rank alone."""
        return self._holders(unit, (self.pipeline_rank,))

    def _holders(self, unit: int, users: Users) -> Holders:
        return self.holders.get((self.layout.pool_of(unit), users), Holders())

    def side_users_of(self, unit: int) -> Group | None:
        return self.side_users.get(self.layout.users[unit])

    @property
    def device(self) -> torch.device:
        return self.ranks.device

    def world_rank(self, pipeline_rank: int) -> int:
        """Number in the world of the rank with this pipeline rank and the other coordinates of this one."""
        return self.layout.mesh.at_pipeline(self.ranks.rank, pipeline_rank)

    def close(self) -> None:
        of_units = [group for one in self.holders.values() for group in (one.shard, one.replica, one.side_replica)]
        single = [self.expert, self.same_experts, self.side_world, self.saving, self.measuring, self.choosing]
        # Units have some groups in common.
        for group in dict.fromkeys([*of_units, *single, *self.side_users.values(), *self.channels.values()]):
            if group is not None:
                dist.destroy_process_group(group)


def open_mesh(layout: Layout, ranks: Ranks) -> Mesh:
    """The mesh of this rank. Every rank calls this: all of them make the groups in one order."""
    assert layout.mesh.ranks == ranks.world, "the layout covers the ranks"
    if ranks.world == 1:
        return Mesh(layout, ranks)
    with ranks.heartbeat.waiting("makes groups of ranks"):
        mesh = _connected(layout, ranks)
        _greet(mesh)
        return mesh


def _connected(layout: Layout, ranks: Ranks) -> Mesh:
    """The mesh with its groups. torch is called for them on each rank: on GPUs a constant number of times, whatever the
    number of ranks, and twice for each set of pipeline ranks that share a block; on CPUs, where a call costs nothing,
    once for each group."""
    maker = _GroupMaker(ranks)
    columns = [*map(list, layout.mesh.groups("pipeline"))]
    world = [list(range(ranks.world))]
    alike = [*map(list, layout.mesh.expert_groups("replica", "expert_shard"))]
    return Mesh(
        layout,
        ranks,
        holders=_holders(layout, maker),
        expert=maker.mine([*map(list, layout.mesh.expert_groups("expert"))]),
        same_experts=maker.mine(alike) if layout.expert_groups > 1 else None,
        side_world=maker.mine(world),
        side_users=_side_users(layout, maker),
        saving=maker.on_host(world),
        measuring=maker.mine(columns) if layout.measures else None,
        choosing=maker.mine([*map(list, layout.mesh.data_groups)]) if layout.balances_steps else None,
        channels=_channels(layout, maker) if maker.on_gpus else {},
    )


def _holders(layout: Layout, maker: "_GroupMaker") -> dict[tuple[Pool, Users], Holders]:
    # The ranks with one place in all replicas are the same for all units.
    replicas = [*map(list, layout.mesh.groups("replica"))]
    replica, side_replica = maker.mine(replicas), maker.mine(replicas)
    found: dict[tuple[Pool, Users], Holders] = {}
    # Experts that are not spread are held as all other units.
    for pools in ([pool] for pool in POOLS) if layout.expert_ranks > 1 else [POOLS]:
        groups = partial(layout.groups_of_replica, pools[0])
        for users, shard in _mine_of_each(layout, maker, _sets_of_users(layout, pools), groups).items():
            (mine,) = (ranks for ranks in groups(users) if maker.ranks.rank in ranks)
            holders = Holders(mine.index(maker.ranks.rank), len(mine), shard, replica, side_replica)
            found |= {(pool, users): holders for pool in pools}
    return found


def _side_users(layout: Layout, maker: "_GroupMaker") -> dict[Users, Group | None]:
    return _mine_of_each(
        layout, maker, _sets_of_users(layout, POOLS), partial(layout.mesh.at_each_pipeline, layout.mesh.data_groups)
    )


def _sets_of_users(layout: Layout, pools: Sequence[Pool]) -> dict[Users, Users]:
    """The sets of pipeline ranks that use a unit of these pools together, and each pipeline rank alone, as layers are
    measured there; by themselves."""
    alone = ((rank,) for rank in range(layout.pipeline))
    common = {
        layout.users[unit] for unit in filter(layout.is_common, range(layout.units)) if layout.pool_of(unit) in pools
    }
    return {users: users for users in (*alone, *sorted(common))}


@dataclass(frozen=True)
class _GroupMaker:
    """Makes groups. Every rank asks for the same groups in the same order, and gets those that it is in."""

    ranks: Ranks

    @property
    def on_gpus(self) -> bool:
        return self.ranks.device.type == "cuda"

    def mine(self, members: list[list[int]]) -> Group | None:
        """This rank's group on the device's network; `members` are disjoint sets of ranks. None for a rank that is
        alone in its set, or in none."""
        if not self.on_gpus:
            return self.on_host(members)
        several = [one for one in members if len(one) > 1]
        # One collective call of all ranks for all these groups together.
        return _own(dist.split_group(split_ranks=several, timeout=self.ranks.limit)) if several else None

    def on_host(self, members: list[list[int]]) -> Group | None:
        made = [dist.new_group(one, backend="gloo", timeout=self.ranks.limit) for one in members if len(one) > 1]
        return next(filter(None, map(_own, made)), None)


def _own(group: object) -> Group | None:
    """The group, or None where this rank is not in it: torch then returns a number."""
    return group if isinstance(group, Group) else None


def _channels(layout: Layout, maker: _GroupMaker) -> dict[Channel, Group | None]:
    hops = {(layout.rank_of(p), layout.rank_of(p + 1)) for p in range(layout.head)}
    pairs: dict[Channel, tuple[int, ...]] = {}
    for source, target in sorted(hop for hop in hops if hop[0] != hop[1]):
        pairs[Flow.ACTIVATION, source, target] = (source, target)
        pairs[Flow.GRADIENT, target, source] = (source, target)
    # One of each data rank.
    return _mine_of_each(layout, maker, pairs, partial(layout.mesh.at_each_pipeline, layout.mesh.groups()))


def _mine_of_each(
    layout: Layout, maker: _GroupMaker, sets: Mapping[_Name, Users], groups: Callable[[Users], Groups]
) -> dict[_Name, Group | None]:
    """This rank's group of each set that it is in, by name; None: it is alone in it. `sets`: name -> pipeline ranks;
    `groups`: the groups that such a set has."""
    found: dict[_Name, Group | None] = {}
    here = layout.mesh.coordinates(maker.ranks.rank).pipeline
    for together in _rounds(sets):
        mine = maker.mine([[*ranks] for name in together for ranks in groups(sets[name])])
        found |= {name: mine for name in together if here in sets[name]}
    return found


def _rounds(sets: Mapping[_Name, Users]) -> list[list[_Name]]:
    """The names in lists of disjoint sets, as few lists as a greedy search finds: about five for the channels of a
    ring."""
    rounds: list[list[_Name]] = []
    for name, members in sets.items():
        fitting = (one for one in rounds if all(set(members).isdisjoint(sets[other]) for other in one))
        one = next(fitting, None)
        if one is None:
            rounds.append([name])
        else:
            one.append(name)
    return rounds


def _greet(mesh: Mesh) -> None:
    """Sends a number through each channel, before the first step.

    NCCL connects two ranks in their first message, and whoever comes first stands still until the other comes. In a
    step, the other might first need something from it. Here nobody needs anything: all ranks go through the channels in
    one order, so the two ranks of the first channel that is not done are always there.
    """
    here = mesh.pipeline_rank
    for (_, source, target), group in sorted(mesh.channels.items(), key=lambda item: _sortable(item[0])):
        number = torch.zeros(1, device=mesh.device)
        act, other = (dist.isend, target) if here == source else (dist.irecv, source)
        work = act(number, mesh.world_rank(other), group=group)
        assert work is not None, "this rank is part of the group"
        work.wait()
        # On a GPU only this waits.
        number.item()


def _sortable(channel: Channel) -> tuple[str, int, int]:
    return (channel[0].value, *channel[1:])

"""A rank's place among pipeline and data ranks, and the groups of ranks that it speaks with."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from pseudoreal_trainer.engine.ranks import Ranks
from pseudoreal_trainer.plan.layout import Layout
from pseudoreal_trainer.plan.steps import Flow

Group = dist.ProcessGroup


@dataclass(frozen=True)
class Grid:
    """Groups of one rank are None. Groups named `host` move host memory, by gloo, and belong to the side thread while
    a step runs: two threads that used one group could mix up their collectives."""

    layout: Layout
    ranks: Ranks
    data: Group | None = None
    """The data ranks of this pipeline rank, on the device's network."""
    host_world: Group | None = None
    host_data: Group | None = None
    saving: Group | None = None
    """All ranks, on the host; belongs to the thread that saves checkpoints."""
    measuring: Group | None = None
    """The pipeline ranks of this data rank, on the device's network, where gradients of layers are measured."""
    ties: dict[tuple[int, ...], Group] = field(default_factory=dict)
    """Pipeline ranks that share a block -> group of them with this data rank, on the host."""
    channels: dict[tuple[Flow, int, int], Group] = field(default_factory=dict)
    """(flow, from, to) with pipeline ranks -> group. NCCL knows no tags, so each channel has its own."""

    @property
    def pipeline_rank(self) -> int:
        return self.ranks.rank // self.layout.data

    @property
    def data_rank(self) -> int:
        return self.ranks.rank % self.layout.data

    @property
    def device(self) -> torch.device:
        return self.ranks.device

    def world_rank(self, pipeline_rank: int) -> int:
        """Of the same data rank."""
        return self.layout.world_rank(pipeline_rank, self.data_rank)

    def close(self) -> None:
        single = [self.data, self.host_world, self.host_data, self.saving, self.measuring]
        for group in [*single, *self.ties.values(), *self.channels.values()]:
            if group is not None:
                dist.destroy_process_group(group)


def open_grid(layout: Layout, ranks: Ranks) -> Grid:
    """Every rank calls this: groups are made in one order by all."""
    assert layout.pipeline * layout.data == ranks.world, "the layout covers the ranks"
    if ranks.world == 1:
        return Grid(layout, ranks)
    with ranks.stamps.wait("groups of ranks"):
        return _connected(layout, ranks)


def _connected(layout: Layout, ranks: Ranks) -> Grid:
    maker = _GroupMaker(ranks.device)
    stages = range(layout.pipeline)
    rows = [[layout.world_rank(p, d) for d in range(layout.data)] for p in stages]
    columns = [[layout.world_rank(p, d) for p in stages] for d in range(layout.data)]
    backend = "nccl" if ranks.device.type == "cuda" else "gloo"
    return Grid(
        layout,
        ranks,
        data=maker.mine(rows, backend),
        host_world=maker.mine([range(ranks.world)], "gloo"),
        host_data=maker.mine(rows, "gloo"),
        saving=maker.mine([range(ranks.world)], "gloo"),
        measuring=maker.mine(columns, backend) if layout.measures else None,
        ties=_ties(layout, maker),
        channels=_channels(layout, maker, backend),
    )


@dataclass(frozen=True)
class _GroupMaker:
    device: torch.device

    def mine(self, members: Iterable[Iterable[int]], backend: str) -> Group | None:
        """Makes all these groups; the result is the one with this rank, None when it is alone or in none."""
        found: Group | None = None
        # With a device, NCCL connects the ranks here. Otherwise their first message would, and the rank that starts to
        # receive would stand still until the other one sends, which may need something from it before.
        device = self.device if backend == "nccl" else None
        for group_ranks in map(list, members):
            if len(group_ranks) > 1:
                group = dist.new_group(group_ranks, backend=backend, device_id=device)
                if isinstance(group, Group):
                    found = group
        return found


def _ties(layout: Layout, maker: _GroupMaker) -> dict[tuple[int, ...], Group]:
    ties = {}
    for users in sorted({users for users in layout.users if len(users) > 1}):
        members = [[layout.world_rank(p, d) for p in users] for d in range(layout.data)]
        group = maker.mine(members, "gloo")
        if group is not None:
            ties[users] = group
    return ties


def _channels(layout: Layout, maker: _GroupMaker, backend: str) -> dict[tuple[Flow, int, int], Group]:
    channels: dict[tuple[Flow, int, int], Group] = {}
    if backend == "gloo":
        return channels
    hops = {(layout.rank_of(p), layout.rank_of(p + 1)) for p in range(layout.head)}
    for source, target in sorted(hop for hop in hops if hop[0] != hop[1]):
        for channel in ((Flow.ACTIVATION, source, target), (Flow.GRADIENT, target, source)):
            pairs = [[layout.world_rank(p, d) for p in channel[1:]] for d in range(layout.data)]
            group = maker.mine(pairs, backend)
            if group is not None:
                channels[channel] = group
    return channels

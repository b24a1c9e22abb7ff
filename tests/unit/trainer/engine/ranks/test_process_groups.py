"""Groups of a rank, with their time limit and network, from the recorded calls to torch."""

from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from itertools import combinations
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from pseudoreal_trainer.engine.ranks import process_groups
from pseudoreal_trainer.engine.ranks.process_groups import ProcessGroups
from pseudoreal_trainer.engine.ranks.ranks import Ranks
from pseudoreal_trainer.plan.layout import Layout
from pseudoreal_trainer.plan.memory.communicators import communicators
from pseudoreal_trainer.plan.records import Flow

LIMIT = timedelta(seconds=77)
CPU, GPU, XPU = torch.device("cpu"), torch.device("cuda", 0), torch.device("xpu", 0)


class Made(dist.ProcessGroup):
    def __init__(self, members: tuple[int, ...], network: str) -> None:
        super().__init__(0, len(members))
        self.members, self.network = members, network


class Recorder:
    """Replacement for torch on one rank."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.calls: list[tuple[str, Any, Any]] = []
        """Function, sets of ranks, and time limit of each call."""

    def split_group(self, *, split_ranks: list[list[int]], timeout: Any) -> Made | int:
        self.calls.append(("split", split_ranks, timeout))
        mine = [tuple(one) for one in split_ranks if self._rank in one]
        return Made(mine[0], "nccl") if mine else -100

    def new_group(self, ranks: list[int], *, backend: str = "default", timeout: Any) -> Made | int:
        self.calls.append(("new", [ranks], timeout))
        return Made(tuple(ranks), backend) if self._rank in ranks else -100


def layout_of(pipeline: int, data: int, **changes: Any) -> Layout:
    return Layout(tuple(range(2 * pipeline)), pipeline, data, 2, **{"sharding": "Full", **changes})


@pytest.fixture
def connect(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[tuple[ProcessGroups, Recorder]]]:
    """Returns the groups of each rank, and the recorder of its calls to torch."""

    def groups_of_all_ranks(layout: Layout, device: torch.device) -> list[tuple[ProcessGroups, Recorder]]:
        found = []
        for rank in range(layout.pipeline * layout.data):
            recorder = Recorder(rank)
            monkeypatch.setattr(dist, "split_group", recorder.split_group)
            monkeypatch.setattr(dist, "new_group", recorder.new_group)
            ranks = Ranks(rank, layout.pipeline * layout.data, device, limit=LIMIT)
            found.append((process_groups._create(layout, ranks), recorder))
        return found

    return groups_of_all_ranks


LAYOUTS = [
    layout_of(2, 1),
    layout_of(4, 2),
    layout_of(3, 2, order="1F1B"),
    layout_of(5, 3, measures=True),
    layout_of(2, 4, replicas=2, measures=True),
    layout_of(1, 3, replicas=3),
    layout_of(2, 4, replicas=2, expert_ranks=2, layer_experts=(0,) * 4),
    layout_of(2, 4, replicas=2, ends_are_one=True),
    layout_of(2, 4, tensor_ranks=2),
    layout_of(1, 8, replicas=2, tensor_ranks=2, context_ranks=2, expert_ranks=4, layer_experts=(0,) * 2),
    Layout((0, 0, 0, 0), 2, 2, 2, sharding="Full"),
    Layout((0, 1, 2, 0, 1, 2, 3, 3), 4, 2, 2, order="GPipe"),
]


@pytest.mark.parametrize("device", [CPU, GPU, XPU], ids=["cpu", "gpu", "xpu"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_all_ranks_create_groups_in_one_order_with_the_collective_timeout(
    layout: Layout, device: torch.device, connect: Callable[..., list[tuple[ProcessGroups, Recorder]]]
) -> None:
    """So no rank waits for a group that another rank creates later."""
    found = connect(layout, device)
    assert all(recorder.calls == found[0][1].calls for _, recorder in found)
    for _, sets, limit in found[0][1].calls:
        assert limit == LIMIT
        assert all(set(a).isdisjoint(b) for a, b in combinations(sets, 2)), "a rank is in one group of a call"


@pytest.mark.parametrize(
    "layout",
    [
        *LAYOUTS,
        layout_of(1, 1),
        layout_of(1, 4, expert_ranks=2, expert_groups=2, layer_experts=(0, 0)),
        layout_of(2, 4, expert_ranks=4, layer_experts=(0, 0, 1, 1), balances_steps=True),
    ],
    ids=str,
)
def test_plan_counts_the_communicators_of_each_rank(
    layout: Layout, connect: Callable[..., list[tuple[ProcessGroups, Recorder]]]
) -> None:
    """The default group of all ranks, and every group of another use, even of the same ranks."""
    if layout.mesh.ranks == 1:
        assert communicators(layout, 0) == 0
        return
    for groups, _ in connect(layout, GPU):
        of_units = [group for one in groups.of_units.values() for group in (one.intra, one.inter, one.inter_reduce)]
        single = [
            *(groups.expert, groups.same_experts, groups.context, groups.tensor),
            *(groups.reduce_world, groups.probe, groups.router_counts),
        ]
        several = [*of_units, *single, *groups.reduce_users.values(), *groups.p2p.values()]
        found = {id(group) for group in several if group is not None}
        assert communicators(layout, groups.pipeline_rank) == 1 + len(found)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize(("device", "network"), [(GPU, "nccl"), (XPU, "default")], ids=["gpu", "xpu"])
def test_on_accelerators_all_groups_but_checkpoint_use_the_device_s_network(
    device: torch.device,
    network: str,
    layout: Layout,
    connect: Callable[..., list[tuple[ProcessGroups, Recorder]]],
) -> None:
    """The network of the default group is the device's."""
    for groups, _ in connect(layout, device):
        named: list[Any] = [
            *(group for one in groups.of_units.values() for group in (one.intra, one.inter, one.inter_reduce)),
            groups.expert,
            groups.reduce_world,
            groups.probe,
        ]
        used = [group for group in (*named, *groups.reduce_users.values(), *groups.p2p.values()) if group]
        assert {group.network for group in used} == {network}
        assert isinstance(groups.checkpoint, Made)
        assert groups.checkpoint.network == "gloo", "a thread of its own moves host memory"


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("device", [CPU, GPU, XPU], ids=["cpu", "gpu", "xpu"])
def test_unit_groups_contain_the_ranks_that_share_a_block(
    layout: Layout, device: torch.device, connect: Callable[..., list[tuple[ProcessGroups, Recorder]]]
) -> None:
    for groups, _ in connect(layout, device):
        together = {users for users in layout.users if len(users) > 1 and groups.pipeline_rank in users}
        assert groups.reduce_users.keys() == {(groups.pipeline_rank,), *together}
        coordinates = layout.mesh.coordinates
        here = coordinates(groups.ranks.rank)
        for users in together:
            ranks = [rank for rank in range(groups.ranks.world) if coordinates(rank).pipeline in users]
            assert cast(Any, groups.reduce_users[users]).members == tuple(ranks)
            within = [rank for rank in ranks if coordinates(rank).replica == here.replica]
            coordinates_in = {
                "None": lambda _: 0,
                "Experts": layout.mesh.expert_coordinate,
                "Tensors": layout.mesh.tensor_coordinate,
            }
            for fold in {layout.fold_of(unit) for unit, them in enumerate(layout.users) if them == users}:
                coordinate = coordinates_in[fold]
                members = [rank for rank in within if coordinate(rank) == coordinate(groups.ranks.rank)]
                unit_groups = groups.of_units[fold, users]
                assert cast(Any, unit_groups.intra).members == tuple(members)
                assert (unit_groups.rank_in_replica, unit_groups.replica_size) == (
                    members.index(groups.ranks.rank),
                    len(members),
                )


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_ranks_that_use_a_unit_hold_all_of_its_shards(
    layout: Layout, connect: Callable[..., list[tuple[ProcessGroups, Recorder]]]
) -> None:
    """Each part occurs once, or once for each part of the experts; neighbouring places have neighbouring parts."""
    made = [groups for groups, _ in connect(layout, CPU)]
    for unit, users in enumerate(layout.users):
        ranks = [groups for groups in made if groups.pipeline_rank in users]
        spread = layout.mesh.fold_size(layout.fold_of(unit))
        assert Counter(groups.part(unit) for groups in ranks) == dict.fromkeys(range(layout.holders(unit)), spread)
        for groups in ranks:
            assert groups.part(unit) // layout.replicas == groups.unit_groups(unit).rank_in_replica


def test_intra_is_the_replica_and_inter_has_one_rank_of_each_replica(
    connect: Callable[..., list[tuple[ProcessGroups, Recorder]]],
) -> None:
    """Two pipeline ranks with six data ranks each; the ranks of a replica are neighbours."""
    for rank, (groups, _) in enumerate(connect(layout_of(2, 6, replicas=2), CPU)):
        first, place = rank // 6 * 6, rank % 3
        unit_groups = groups.of_units["None", (rank // 6,)]
        of_unit: list[Any] = [unit_groups.intra, unit_groups.inter, unit_groups.inter_reduce]
        within, across, side = (group.members for group in of_unit)
        assert within == tuple(rank - place + other for other in range(3))
        assert across == side == (first + place, first + 3 + place)
        assert groups.data_rank == rank - first
        assert groups.part(1 + rank // 6) == place * 2 + (rank - first) // 3
        assert groups.expert is None


def test_expert_groups_hold_all_experts_and_same_experts_groups_hold_the_same(
    connect: Callable[..., list[tuple[ProcessGroups, Recorder]]],
) -> None:
    """Two pipeline ranks with two replicas of four data ranks: two neighbours have all experts, and so have the other
    two."""
    layout = layout_of(2, 8, replicas=2, expert_ranks=2, layer_experts=(0,) * 4)
    for rank, (groups, _) in enumerate(connect(layout, CPU)):
        first, of_replica = rank // 4 * 4, rank % 4
        unit_groups, expert = groups.of_units["Experts", (rank // 8,)], cast(Any, groups.expert)
        of_unit: list[Any] = [unit_groups.intra, unit_groups.inter, unit_groups.inter_reduce]
        within, across, side = (group.members for group in of_unit)
        assert expert.members == (rank - of_replica % 2, rank - of_replica % 2 + 1)
        assert within == (first + of_replica % 2, first + of_replica % 2 + 2)
        assert across == side == tuple(rank // 8 * 8 + other * 4 + of_replica for other in range(2))
        assert layout.data_part(layout.experts_units(0)[0], rank) == of_replica // 2 * 2 + rank % 8 // 4


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_message_has_a_p2p_channel_on_both_ranks(
    layout: Layout, connect: Callable[..., list[tuple[ProcessGroups, Recorder]]]
) -> None:
    for groups, _ in connect(layout, GPU):
        here, expected = groups.pipeline_rank, set()
        for position in range(layout.head):
            low, high = layout.rank_of(position), layout.rank_of(position + 1)
            if low != high and here in (low, high):
                expected |= {(Flow.ACTIVATION, low, high), (Flow.GRADIENT, high, low)}
        channels: dict[Any, Any] = dict(groups.p2p)
        assert channels.keys() == expected
        assert len({id(group) for group in channels.values()}) == len(channels), "a message holds up no other"
        for (_, source, target), group in channels.items():
            assert set(group.members) == {groups.world_rank(source), groups.world_rank(target)}


@pytest.mark.parametrize(("pipeline", "data", "replicas"), [(2, 1, 1), (8, 2, 1), (16, 8, 2), (64, 16, 4)])
def test_group_creation_takes_a_constant_number_of_calls_on_gpus(
    pipeline: int, data: int, replicas: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder(0)
    monkeypatch.setattr(dist, "split_group", recorder.split_group)
    monkeypatch.setattr(dist, "new_group", recorder.new_group)
    process_groups._create(layout_of(pipeline, data, replicas=replicas), Ranks(0, pipeline * data, GPU))
    assert len(recorder.calls) <= 12


def test_all_p2p_channels_are_connected_in_one_order(
    connect: Callable[..., list[tuple[ProcessGroups, Recorder]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks together reach the end if each waits in every call until its peer makes the matching call."""
    layout = layout_of(5, 2)
    calls: list[list[tuple[str, frozenset[int]]]] = []
    for groups, _ in connect(layout, GPU):
        own: list[tuple[str, frozenset[int]]] = []
        for name in ("isend", "irecv"):

            def act(_: Any, __: int, group: Any, name: str = name, own: Any = own) -> Mock:
                own.append((name, frozenset(group.members)))
                return Mock()

            monkeypatch.setattr(dist, name, act)
        on_cpu = Ranks(groups.ranks.rank, groups.ranks.world, CPU)
        process_groups._connect_channels(ProcessGroups(layout, on_cpu, p2p=groups.p2p))
        calls.append(own)
    _run_collectives(calls)


def _run_collectives(calls: list[list[tuple[str, frozenset[int]]]]) -> None:
    while any(calls):
        for rank, own in enumerate(calls):
            if own and (met := _partner(rank, own[0], calls)) is not None:
                calls[rank], calls[met] = own[1:], calls[met][1:]
                break
        else:
            pytest.fail(f"all ranks wait: {calls}")


def _partner(rank: int, call: tuple[str, frozenset[int]], calls: list[list[tuple[str, frozenset[int]]]]) -> int | None:
    (other,) = call[1] - {rank}
    expected = ("irecv" if call[0] == "isend" else "isend", call[1])
    return other if calls[other] and calls[other][0] == expected else None

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
from pseudoreal_trainer.engine.ranks import mesh as meshes
from pseudoreal_trainer.engine.ranks.mesh import Mesh
from pseudoreal_trainer.engine.ranks.ranks import Ranks
from pseudoreal_trainer.plan.layout import Layout
from pseudoreal_trainer.plan.records import Flow

LIMIT = timedelta(seconds=77)
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


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

    def new_group(self, ranks: list[int], *, backend: str, timeout: Any) -> Made | int:
        self.calls.append(("new", [ranks], timeout))
        return Made(tuple(ranks), backend) if self._rank in ranks else -100


def layout_of(pipeline: int, data: int, **changes: Any) -> Layout:
    return Layout(tuple(range(2 * pipeline)), pipeline, data, 2, **{"sharding": "Full", **changes})


@pytest.fixture
def connect(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[tuple[Mesh, Recorder]]]:
    """Returns the mesh of each rank, and the recorder of its calls to torch."""

    def of_all(layout: Layout, device: torch.device) -> list[tuple[Mesh, Recorder]]:
        found = []
        for rank in range(layout.pipeline * layout.data):
            recorder = Recorder(rank)
            monkeypatch.setattr(dist, "split_group", recorder.split_group)
            monkeypatch.setattr(dist, "new_group", recorder.new_group)
            ranks = Ranks(rank, layout.pipeline * layout.data, device, limit=LIMIT)
            found.append((meshes._connected(layout, ranks), recorder))
        return found

    return of_all


LAYOUTS = [
    layout_of(2, 1),
    layout_of(4, 2),
    layout_of(3, 2, order="1F1B"),
    layout_of(5, 3, measures=True),
    layout_of(2, 4, replicas=2, measures=True),
    layout_of(1, 3, replicas=3),
    layout_of(2, 4, replicas=2, expert_ranks=2, layer_experts=(0,) * 4),
    layout_of(2, 4, replicas=2, ends_are_one=True),
    Layout((0, 0, 0, 0), 2, 2, 2, sharding="Full"),
    Layout((0, 1, 2, 0, 1, 2, 3, 3), 4, 2, 2, order="GPipe"),
]


@pytest.mark.parametrize("device", [CPU, GPU], ids=["cpu", "gpu"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_all_ranks_make_the_same_groups_in_one_order_each_with_the_limit(
    layout: Layout, device: torch.device, connect: Callable[..., list[tuple[Mesh, Recorder]]]
) -> None:
    """So no rank waits for a group that another rank creates later."""
    found = connect(layout, device)
    assert all(recorder.calls == found[0][1].calls for _, recorder in found)
    for _, sets, limit in found[0][1].calls:
        assert limit == LIMIT
        assert all(set(a).isdisjoint(b) for a, b in combinations(sets, 2)), "a rank is in one group of a call"


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_on_gpus_all_but_the_saving_group_are_on_the_network_of_the_gpus(
    layout: Layout, connect: Callable[..., list[tuple[Mesh, Recorder]]]
) -> None:
    for mesh, _ in connect(layout, GPU):
        named: list[Any] = [
            *(group for one in mesh.holders.values() for group in (one.shard, one.replica, one.side_replica)),
            mesh.expert,
            mesh.side_world,
            mesh.measuring,
        ]
        used = [group for group in (*named, *mesh.side_users.values(), *mesh.channels.values()) if group]
        assert {group.network for group in used} == {"nccl"}
        assert isinstance(mesh.saving, Made)
        assert mesh.saving.network == "gloo", "a thread of its own moves host memory"


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("device", [CPU, GPU], ids=["cpu", "gpu"])
def test_ranks_find_those_with_whom_they_share_a_block(
    layout: Layout, device: torch.device, connect: Callable[..., list[tuple[Mesh, Recorder]]]
) -> None:
    for mesh, _ in connect(layout, device):
        together = {users for users in layout.users if len(users) > 1 and mesh.pipeline_rank in users}
        assert mesh.side_users.keys() == {(mesh.pipeline_rank,), *together}
        coordinates = layout.mesh.coordinates
        here = coordinates(mesh.ranks.rank)
        for users in together:
            ranks = [rank for rank in range(mesh.ranks.world) if coordinates(rank).pipeline in users]
            assert cast(Any, mesh.side_users[users]).members == tuple(ranks)
            within = [rank for rank in ranks if coordinates(rank).replica == here.replica]
            coordinate = layout.mesh.expert_coordinate
            same = [rank for rank in within if coordinate(rank) == coordinate(mesh.ranks.rank)]
            for pool in {layout.pool_of(unit) for unit, them in enumerate(layout.users) if them == users}:
                holders, members = mesh.holders[pool, users], same if pool == "Experts" else within
                assert cast(Any, holders.shard).members == tuple(members)
                assert (holders.place, holders.places) == (members.index(mesh.ranks.rank), len(members))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_ranks_that_use_a_unit_have_all_of_its_parts(
    layout: Layout, connect: Callable[..., list[tuple[Mesh, Recorder]]]
) -> None:
    """Each part occurs once, or once for each part of the experts; neighbouring places have neighbouring parts."""
    made = [mesh for mesh, _ in connect(layout, CPU)]
    for unit, users in enumerate(layout.users):
        ranks = [mesh for mesh in made if mesh.pipeline_rank in users]
        spread = layout.expert_ranks if layout.pool_of(unit) == "Experts" else 1
        assert Counter(mesh.part(unit) for mesh in ranks) == dict.fromkeys(range(layout.holders(unit)), spread)
        for mesh in ranks:
            assert mesh.part(unit) // layout.replicas == mesh.holders_of(unit).place


def test_the_ranks_of_a_replica_and_those_with_one_place_in_all_of_them(
    connect: Callable[..., list[tuple[Mesh, Recorder]]],
) -> None:
    """Two pipeline ranks with six data ranks each; the ranks of a replica are neighbours."""
    for rank, (mesh, _) in enumerate(connect(layout_of(2, 6, replicas=2), CPU)):
        first, place = rank // 6 * 6, rank % 3
        holders = mesh.holders["Blocks", (rank // 6,)]
        groups: list[Any] = [holders.shard, holders.replica, holders.side_replica]
        within, across, side = (group.members for group in groups)
        assert within == tuple(rank - place + other for other in range(3))
        assert across == side == (first + place, first + 3 + place)
        assert mesh.data_rank == rank - first
        assert mesh.part(1 + rank // 6) == place * 2 + (rank - first) // 3
        assert mesh.expert is None
        assert mesh.holders["Experts", (rank // 6,)] is holders, "experts that are not spread are held as all else"


def test_the_ranks_with_the_same_experts_and_those_that_have_all(
    connect: Callable[..., list[tuple[Mesh, Recorder]]],
) -> None:
    """Two pipeline ranks with two replicas of four data ranks: two neighbours have all experts, and so have the other
    two."""
    layout = layout_of(2, 8, replicas=2, expert_ranks=2, layer_experts=(0,) * 4)
    for rank, (mesh, _) in enumerate(connect(layout, CPU)):
        first, of_replica = rank // 4 * 4, rank % 4
        holders, expert = mesh.holders["Experts", (rank // 8,)], cast(Any, mesh.expert)
        groups: list[Any] = [holders.shard, holders.replica, holders.side_replica]
        within, across, side = (group.members for group in groups)
        assert expert.members == (rank - of_replica % 2, rank - of_replica % 2 + 1)
        assert within == (first + of_replica % 2, first + of_replica % 2 + 2)
        assert across == side == tuple(rank // 8 * 8 + other * 4 + of_replica for other in range(2))
        assert layout.data_part(layout.experts_units(0)[0], rank) == of_replica // 2 * 2 + rank % 8 // 4


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_message_has_a_channel_that_both_of_its_ranks_know(
    layout: Layout, connect: Callable[..., list[tuple[Mesh, Recorder]]]
) -> None:
    for mesh, _ in connect(layout, GPU):
        here, expected = mesh.pipeline_rank, set()
        for position in range(layout.head):
            low, high = layout.rank_of(position), layout.rank_of(position + 1)
            if low != high and here in (low, high):
                expected |= {(Flow.ACTIVATION, low, high), (Flow.GRADIENT, high, low)}
        channels: dict[Any, Any] = dict(mesh.channels)
        assert channels.keys() == expected
        assert len({id(group) for group in channels.values()}) == len(channels), "a message holds up no other"
        for (_, source, target), group in channels.items():
            assert set(group.members) == {mesh.world_rank(source), mesh.world_rank(target)}


@pytest.mark.parametrize(("pipeline", "data", "replicas"), [(2, 1, 1), (8, 2, 1), (16, 8, 2), (64, 16, 4)])
def test_the_number_of_calls_does_not_grow_with_the_ranks(
    pipeline: int, data: int, replicas: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder(0)
    monkeypatch.setattr(dist, "split_group", recorder.split_group)
    monkeypatch.setattr(dist, "new_group", recorder.new_group)
    meshes._connected(layout_of(pipeline, data, replicas=replicas), Ranks(0, pipeline * data, GPU))
    assert len(recorder.calls) <= 12


def test_a_number_goes_through_every_channel_in_one_order(
    connect: Callable[..., list[tuple[Mesh, Recorder]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks together reach the end if each waits in every call until its peer makes the matching call."""
    layout = layout_of(5, 2)
    calls: list[list[tuple[str, frozenset[int]]]] = []
    for mesh, _ in connect(layout, GPU):
        own: list[tuple[str, frozenset[int]]] = []
        for name in ("isend", "irecv"):

            def act(_: Any, __: int, group: Any, name: str = name, own: Any = own) -> Mock:
                own.append((name, frozenset(group.members)))
                return Mock()

            monkeypatch.setattr(dist, name, act)
        on_cpu = Ranks(mesh.ranks.rank, mesh.ranks.world, CPU)
        meshes._greet(Mesh(layout, on_cpu, channels=mesh.channels))
        calls.append(own)
    _finish(calls)


def _finish(calls: list[list[tuple[str, frozenset[int]]]]) -> None:
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

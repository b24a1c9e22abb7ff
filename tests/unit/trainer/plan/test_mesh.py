"""Ranks, their coordinates, and groups of ranks; the oracle is a numpy array of all ranks, reshaped."""

from itertools import combinations

import numpy as np
import pytest
from pseudoreal_trainer.plan.mesh import DIMENSIONS, EXPERT_DIMENSIONS, Coordinates, Mesh

RANKS = 8


def factors(number: int, count: int) -> list[tuple[int, ...]]:
    """Return all ways to write a number as a product of `count` ordered factors."""
    if count == 1:
        return [(number,)]
    return [(d, *rest) for d in range(1, number + 1) if number % d == 0 for rest in factors(number // d, count - 1)]


MESHES = [Mesh(*sizes) for sizes in factors(RANKS, len(DIMENSIONS))]
FOLDED = [
    Mesh(**dict(zip(DIMENSIONS, sizes, strict=True)), expert=expert)
    for sizes in factors(RANKS, len(DIMENSIONS))
    for _, expert in factors(RANKS // (sizes[0] * sizes[1]), 2)
]


def test_there_are_ten_meshes_of_eight_ranks() -> None:
    """2 ** 3 has three equal prime factors: 5 over 3 ways to put them into three boxes."""
    assert len(set(MESHES)) == len(MESHES) == 10


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_ranks_and_coordinates_are_a_bijection_with_shard_fastest(mesh: Mesh) -> None:
    array = np.arange(RANKS).reshape(mesh.pipeline, mesh.replica, mesh.shard)
    for place in np.ndindex(*array.shape):
        coordinates = Coordinates(*place)
        assert mesh.rank(coordinates) == array[place]
        assert mesh.coordinates(int(array[place])) == coordinates


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_groups_are_the_rows_of_the_array_of_ranks(mesh: Mesh) -> None:
    shape = [mesh.pipeline, mesh.replica, mesh.shard]
    array = np.arange(RANKS).reshape(shape)
    for count in range(len(DIMENSIONS) + 1):
        for axes in combinations(range(len(DIMENSIONS)), count):
            behind = range(len(DIMENSIONS) - count, len(DIMENSIONS))
            moved = np.moveaxis(array, axes, behind)
            rows = moved.reshape(-1, int(np.prod([shape[axis] for axis in axes], dtype=int)))
            assert {*mesh.groups(*(DIMENSIONS[axis] for axis in axes))} == {*map(tuple, rows.tolist())}


@pytest.mark.parametrize("mesh", FOLDED, ids=str)
def test_experts_fold_over_the_ranks_of_one_pipeline_rank(mesh: Mesh) -> None:
    shape = [mesh.pipeline, mesh.replica, -1, mesh.expert]
    array = np.arange(RANKS).reshape(shape)
    for rank in range(RANKS):
        [[_, replica, shard, expert]] = np.argwhere(array == rank).tolist()
        assert mesh.expert_coordinate(rank) == expert
        assert mesh.expert_shard_coordinate(rank) == shard
        assert mesh.part_in("Experts", rank) == shard * mesh.replica + replica
    for axis, name in enumerate(EXPERT_DIMENSIONS, start=1):
        rows = np.moveaxis(array, axis, -1).reshape(-1, array.shape[axis])
        groups = mesh.expert_groups(name)
        assert {*groups} == {*map(tuple, rows.tolist())}
        assert sorted(rank for group in groups for rank in group) == [*range(RANKS)]
        assert all(len({mesh.coordinates(rank).pipeline for rank in group}) == 1 for group in groups)
        assert name == "replica" or all(len({mesh.coordinates(r).replica for r in group}) == 1 for group in groups)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_shard_index_is_that_of_a_scatter_within_and_then_across_replicas(mesh: Mesh) -> None:
    whole = np.arange(mesh.data)
    for rank in range(RANKS):
        here = mesh.coordinates(rank)
        of_shards = np.split(whole, mesh.shard)[here.shard]
        assert [mesh.part(rank)] == np.split(of_shards, mesh.replica)[here.replica].tolist()
    for group in mesh.data_groups:
        assert sorted(map(mesh.part, group)) == [*map(mesh.data_rank, group)] == [*range(mesh.data)]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_at_pipeline_changes_the_pipeline_coordinate_only(mesh: Mesh) -> None:
    columns = mesh.groups("pipeline")
    for column in columns:
        for rank in column:
            assert tuple(mesh.at_pipeline(rank, other) for other in range(mesh.pipeline)) == column


def test_mesh_with_an_empty_dimension_is_refused_by_its_name() -> None:
    with pytest.raises(ValueError, match=r"^replica is 0: a dimension has at least 1 rank; leave it out for 1$"):
        Mesh(pipeline=2, replica=0)


def test_mesh_whose_experts_do_not_divide_a_replica_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^expert 4 does not divide the 2 ranks of a replica of"):
        Mesh(pipeline=4, replica=6, shard=2, expert=4)

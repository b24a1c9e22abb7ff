"""Communicators of a rank on GPUs, and the device memory that they are assumed to take. Pure."""

from collections.abc import Collection

from pseudoreal_trainer.plan.layout import Layout, Users
from pseudoreal_trainer.plan.mesh import Fold

COMMUNICATOR_BYTES = 64 << 20
"""Device bytes of one NCCL communicator. An assumption, not a measurement: 8 channels with 2 connections each, and a
buffer of 4 MiB (the default of NCCL_BUFFSIZE) for each connection. More channels, as between GPUs with NVLink, take
more; communicators that share resources take less."""


def communicators(layout: Layout, rank: int) -> int:
    """Return the number of communicators of each rank of a pipeline rank: the default group of all ranks, and the
    groups that `engine.ranks.process_groups` splits off it. Groups of one rank have no communicator."""
    mesh = layout.mesh
    if mesh.ranks == 1:
        return 0
    sizes = [
        mesh.ranks,  # the default group
        mesh.ranks,  # agreements on a step
        *[mesh.replica] * 2,  # gathers and reductions across replicas
        *(
            len(users) * (mesh.shard // mesh.fold_size(fold))
            for fold in layout.folds
            for users in _users(layout, rank, [fold])
        ),
        *(len(users) * mesh.data for users in _users(layout, rank, layout.folds)),  # norms of single units
        mesh.expert,  # exchanges of tokens
        mesh.context,  # keys and values of whole sequences
        mesh.tensor,  # tokens and outputs of sliced layers
        mesh.replica * mesh.expert_shard if layout.expert_groups > 1 else 1,  # which groups of experts to fetch
        layout.pipeline if layout.measures else 1,  # gradients of layers
        mesh.data if layout.balances_steps else 1,  # choices of the router
    ]
    return sum(size > 1 for size in sizes) + _channels(layout, rank)


def _users(layout: Layout, rank: int, folds: Collection[Fold]) -> set[Users]:
    """Return the sets of pipeline ranks, this one among them, that share a unit of these folds, and this rank alone."""
    common = (unit for unit in layout.common_units(rank) if layout.fold_of(unit) in folds)
    return {(rank,), *(layout.users[unit] for unit in common)}


def _channels(layout: Layout, rank: int) -> int:
    """Return the number of channels for messages to and from other pipeline ranks: one for each direction and
    neighbour."""
    hops = {(layout.rank_of(position), layout.rank_of(position + 1)) for position in range(layout.head)}
    return sum(2 for hop in hops if rank in hop and hop[0] != hop[1])

"""Arrangement of a phase's ranks in dimensions: the coordinates of each rank, and groups of ranks. Pure.

A rank is a number in mixed radix with the digits of `DIMENSIONS`. The last digit changes fastest, so the ranks with the
most traffic between them are neighbours. Expert, context and tensor parallelism use the ranks of one replica of a
pipeline coordinate again, with digits of their own (parallel folding, Megatron Core, arXiv 2504.14960): the experts one
digit, sequences two, of which the tensor rank changes faster.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import prod
from typing import Literal, get_args

Dimension = Literal["pipeline", "replica", "shard"]
DIMENSIONS: tuple[Dimension, ...] = get_args(Dimension)
ExpertDimension = Literal["replica", "expert_shard", "expert"]
EXPERT_DIMENSIONS: tuple[ExpertDimension, ...] = get_args(ExpertDimension)
Fold = Literal["None", "Experts", "Tensors"]
"""Ranks of a replica with the same unit, whose state they shard. None: all ranks of the replica; Experts: ranks with
the same experts; Tensors: ranks with the same slices of matrices."""

Groups = tuple[tuple[int, ...], ...]
"""Disjoint groups of ranks, each ascending; all groups together contain all ranks, unless a method says otherwise."""


@dataclass(frozen=True)
class Coordinates:
    """Index of a rank in each dimension; indices start at 0."""

    pipeline: int = 0
    replica: int = 0
    shard: int = 0


@dataclass(frozen=True)
class Mesh:
    """Number of ranks in each dimension."""

    pipeline: int = 1
    replica: int = 1
    """Number of groups into which the data ranks of a pipeline rank are cut, for hierarchical collectives."""
    shard: int = 1
    """Number of ranks in each replica of a pipeline rank."""
    expert: int = 1
    """Number of equal parts into which a layer's experts are cut; each rank has one part."""
    context: int = 1
    """Number of context ranks: ranks of a replica with different parts of the same sequences, which attend to each
    other's keys and values."""
    tensor: int = 1
    """Number of tensor ranks: neighbouring ranks of a replica with slices of the same matrices. They divide the tokens
    of a context rank among them."""

    def __post_init__(self) -> None:
        """Raise ValueError if a number is below 1, or if experts or parts of sequences do not fold over the ranks."""
        for name, size in vars(self).items():
            if size < 1:
                raise ValueError(f"{name} is {size}: a dimension has at least 1 rank; leave it out for 1")
        folded = {"expert": self.expert, "context": self.context, "tensor": self.tensor}
        for name, size in {**folded, "context times tensor": self.sequence}.items():
            if self.shard % size:
                raise ValueError(
                    f"{name} {size} does not divide the {self.shard} ranks of a replica of a pipeline rank: choose a"
                    " divisor of that number"
                )

    @property
    def sizes(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in DIMENSIONS}

    @property
    def expert_sizes(self) -> dict[str, int]:
        """Number of ranks in each dimension of the experts; the product is the number of ranks of one pipeline rank."""
        return {"replica": self.replica, "expert_shard": self.expert_shard, "expert": self.expert}

    @property
    def expert_shard(self) -> int:
        """Number of ranks of a replica that have the same experts."""
        return self.shard // self.expert

    @property
    def ranks(self) -> int:
        return prod(self.sizes.values())

    @property
    def data(self) -> int:
        """Number of data ranks of a pipeline rank: ranks with different tokens."""
        return self.replica * self.shard

    @property
    def sequence(self) -> int:
        """Number of ranks that divide the tokens of each sequence among them."""
        return self.context * self.tensor

    @property
    def sequence_groups(self) -> int:
        """Number of groups of ranks of a pipeline rank with the same sequences. The sequences of a micro-batch are
        divided among them."""
        return self.data // self.sequence

    def coordinates(self, rank: int) -> Coordinates:
        assert 0 <= rank < self.ranks, "the rank is in the mesh"
        digits: dict[str, int] = {}
        for name, size in reversed(self.sizes.items()):
            rank, digits[name] = divmod(rank, size)
        return Coordinates(**digits)

    def rank(self, coordinates: Coordinates) -> int:
        number = 0
        for name, size in self.sizes.items():
            digit: int = getattr(coordinates, name)
            assert 0 <= digit < size, f"{name} {digit} is in the mesh"
            number = number * size + digit
        return number

    def at_pipeline(self, rank: int, pipeline_rank: int) -> int:
        """Return the rank with this pipeline coordinate and the other coordinates of `rank`."""
        return self.rank(replace(self.coordinates(rank), pipeline=pipeline_rank))

    def data_rank(self, rank: int) -> int:
        """Return the index of the rank among the data ranks of its pipeline rank."""
        here = self.coordinates(rank)
        return here.replica * self.shard + here.shard

    def sequence_group(self, rank: int) -> int:
        """Return the index of the rank's part of a micro-batch's sequences."""
        return self.data_rank(rank) // self.sequence

    def sequence_coordinate(self, rank: int) -> int:
        """Return the index of the rank's part of the tokens of each of its sequences."""
        return rank % self.sequence

    def tensor_coordinate(self, rank: int) -> int:
        """Return the rank's index among the ranks with slices of the same matrices."""
        return rank % self.tensor

    def part(self, rank: int) -> int:
        """Return the index of the rank's part of a flat vector that is cut into `data` equal parts: first over the
        shards, then each shard's part over the replicas."""
        here = self.coordinates(rank)
        return here.shard * self.replica + here.replica

    def expert_coordinate(self, rank: int) -> int:
        """Return the index of the rank's part of a layer's experts, which are cut into `expert` equal parts."""
        return rank % self.expert

    def expert_shard_coordinate(self, rank: int) -> int:
        """Return the rank's index among the ranks of its replica with the same experts."""
        return rank % self.shard // self.expert

    def fold_size(self, fold: Fold) -> int:
        """Return the number of groups of ranks in a replica, each with the same unit."""
        return {"None": 1, "Experts": self.expert, "Tensors": self.tensor}[fold]

    def part_in(self, fold: Fold, rank: int) -> int:
        """Return the index of the rank's part of a unit. The unit is cut as in `part`, but only among the ranks with
        the same experts or slices."""
        return rank % self.shard // self.fold_size(fold) * self.replica + self.coordinates(rank).replica

    def holders_in_replica(self, fold: Fold) -> Groups:
        """Return the groups of ranks of one replica and pipeline rank that hold the same units."""
        return self._folded_groups(self.fold_size(fold))

    def _folded_groups(self, size: int) -> Groups:
        sizes = {"pipeline": self.pipeline, "replica": self.replica, "shard": self.shard // size, "fold": size}
        return _groups(sizes, ["shard"])

    def groups(self, *dimensions: Dimension) -> Groups:
        """Return the groups of ranks that differ only in these dimensions. In a group, ranks are in the order of their
        numbers."""
        return _groups(self.sizes, dimensions)

    def expert_groups(self, *dimensions: ExpertDimension) -> Groups:
        """Return the groups of ranks of one pipeline rank that differ only in these dimensions of the experts."""
        return _groups({"pipeline": self.pipeline, **self.expert_sizes}, dimensions)

    def at_each_pipeline(self, groups: Groups, pipeline_ranks: Sequence[int]) -> Groups:
        """Return the groups that join corresponding groups of several pipeline ranks. `groups`: groups inside each
        pipeline rank, of all pipeline ranks. `pipeline_ranks`: the pipeline ranks to join, in this order; ranks of
        other pipeline ranks are in no group."""
        first = (ranks for ranks in groups if self.coordinates(ranks[0]).pipeline == 0)
        return tuple(tuple(self.at_pipeline(rank, p) for p in pipeline_ranks for rank in ranks) for ranks in first)

    @cached_property
    def data_groups(self) -> Groups:
        """Groups of the data ranks of each pipeline rank; the ranks of a group have different tokens."""
        return self.groups("replica", "shard")

    @cached_property
    def context_groups(self) -> Groups:
        """Groups of the ranks with the same sequences and slices. In a group, ranks are in the order of their parts."""
        sizes = {"group": self.ranks // self.sequence, "context": self.context, "tensor": self.tensor}
        return _groups(sizes, ["context"])

    @cached_property
    def tensor_groups(self) -> Groups:
        """Groups of the ranks with slices of the same matrices. In a group, ranks are in the order of their slices."""
        return tuple(tuple(range(first, first + self.tensor)) for first in range(0, self.ranks, self.tensor))


def _groups(sizes: Mapping[str, int], varying: Collection[str]) -> Groups:
    """Return the numbers of the mixed radix `sizes`, in groups that differ only in the digits `varying`."""
    found: dict[tuple[int, ...], list[int]] = {}
    kept = [name not in varying for name in sizes]
    for number, digits in enumerate(product(*map(range, sizes.values()))):
        found.setdefault(tuple(digit for digit, keep in zip(digits, kept, strict=True) if keep), []).append(number)
    return tuple(map(tuple, found.values()))

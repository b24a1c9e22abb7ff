"""Which rank does what: the chain of positions, its units, and the mesh of pipeline and data ranks. Pure."""

from dataclasses import dataclass
from functools import cached_property

from pseudoreal_api.spec.optimizer import ClippingMode
from pseudoreal_api.spec.phase import Home, Schedule, StateSharding

from pseudoreal_trainer.plan.mesh import Mesh

_MODULAR = ("Layered", "Interleaved")


@dataclass(frozen=True)
class Layout:
    """Everything that the step plan of a phase depends on."""

    layer_blocks: tuple[int, ...]
    """Entry l is the block of layer l."""
    pipeline: int
    data: int
    """Number of data-parallel ranks of each pipeline rank."""
    micro_batches: int
    replicas: int = 1
    """Number of groups of data ranks, in each of which all parts of a unit are; more than one where states are cut."""
    order: Schedule = "Layered"
    sharding: StateSharding = "None"
    homes: tuple[Home, ...] = ()
    """Home of each unit. Empty: all are on the device."""
    window: int = 2
    """Most working copies of moving units at a time."""
    recompute: bool = True
    stash: bool = False
    """Whether boundary activations wait on the host."""
    clipping: ClippingMode = "Global"
    ends_are_one: bool = False
    """Whether the embedding is in one unit with the head."""
    loss_chunk: int | None = None
    """Most tokens of a micro-batch whose logits are in memory at a time. None: all."""
    measures: bool = False
    """Whether, in some steps, the gradients of layers that share a block are measured one by one."""

    @property
    def layers(self) -> int:
        return len(self.layer_blocks)

    @property
    def head(self) -> int:
        """The last position."""
        return self.layers + 1

    @cached_property
    def units(self) -> int:
        """Number of units: embedding, blocks, and the head unless it is one with the embedding."""
        return max(self.layer_blocks) + (2 if self.ends_are_one else 3)

    def unit_of(self, position: int) -> int:
        if position in (0, self.head):
            return 0 if position == 0 or self.ends_are_one else self.units - 1
        return 1 + self.layer_blocks[position - 1]

    def position_above(self, position: int) -> int | None:
        """The next position whose layer uses the same block; None where there is none."""
        return self._neighbours.get(position)

    def position_below(self, position: int) -> int | None:
        return self._lower_neighbours.get(position)

    def shares(self, position: int) -> bool:
        """Whether another layer uses the block of this position."""
        return position in self._neighbours or position in self._lower_neighbours

    @cached_property
    def _neighbours(self) -> dict[int, int]:
        newest: dict[int, int] = {}
        found: dict[int, int] = {}
        for position, block in enumerate(self.layer_blocks, start=1):
            if block in newest:
                found[newest[block]] = position
            newest[block] = position
        return found

    @cached_property
    def _lower_neighbours(self) -> dict[int, int]:
        return {above: below for below, above in self._neighbours.items()}

    def rank_of(self, position: int) -> int:
        """The pipeline rank of a position. The embedding is with the first layer and the head with the last, so only
        layers send."""
        return self._ranks[position]

    @cached_property
    def _ranks(self) -> tuple[int, ...]:
        """The pipeline rank of each position."""
        layers = range(self.layers)
        if self.order in _MODULAR:
            ranks = [layer % self.pipeline for layer in layers]
        else:
            ranks = [layer * self.pipeline // self.layers for layer in layers]
        return (ranks[0], *ranks, ranks[-1])

    def positions(self, rank: int) -> tuple[int, ...]:
        """The positions of a pipeline rank, ascending."""
        return self._positions[rank]

    @cached_property
    def _positions(self) -> tuple[tuple[int, ...], ...]:
        found: list[list[int]] = [[] for _ in range(self.pipeline)]
        for position, rank in enumerate(self._ranks):
            found[rank].append(position)
        return tuple(map(tuple, found))

    def local_units(self, rank: int) -> tuple[int, ...]:
        """Units that a pipeline rank uses, in the order of their first use."""
        return self._local_units[rank]

    @cached_property
    def _local_units(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(dict.fromkeys(map(self.unit_of, positions))) for positions in self._positions)

    def moving_units(self, rank: int) -> tuple[int, ...]:
        """Units of a pipeline rank whose working copies come and go."""
        return tuple(filter(self.moves, self.local_units(rank)))

    def slots(self, rank: int) -> int:
        """Number of working copies that the window of a pipeline rank holds: never more than there are to hold."""
        return min(self.window, len(self.moving_units(rank)))

    def buffered_units(self, rank: int) -> tuple[int, ...]:
        """Units of a pipeline rank whose gradients grow in buffers that they share."""
        return tuple(filter(self.has_gradient_shard, self.local_units(rank)))

    @cached_property
    def users(self) -> tuple[tuple[int, ...], ...]:
        """For each unit the pipeline ranks that use it. More than one: its gradient is summed over them."""
        found: list[set[int]] = [set() for _ in range(self.units)]
        for position in range(self.head + 1):
            found[self.unit_of(position)].add(self.rank_of(position))
        return tuple(tuple(sorted(ranks)) for ranks in found)

    def home(self, unit: int) -> Home:
        return self.homes[unit] if self.homes else "Device"

    @property
    def shards(self) -> int:
        """Number of parts into which the state of each unit is split. A unit that moves has no whole copy anywhere."""
        return 1 if self.sharding == "None" else self.data

    @property
    def parts_of_replica(self) -> int:
        """Number of neighbouring parts of a state that ranks with one place in all replicas have together."""
        return 1 if self.sharding == "None" else self.replicas

    def moves(self, unit: int) -> bool:
        """Whether the unit's working copy exists in the window only."""
        return self.home(unit) != "Device" or (self.sharding == "Full" and self.data > 1)

    def refreshed(self, unit: int) -> bool:
        """Whether the unit's working copy stays, and is gathered from the updated shards once a step."""
        return not self.moves(unit) and self.shards > 1

    def has_gradient_shard(self, unit: int) -> bool:
        """Whether the unit's gradient is whole only until it is reduced."""
        return self.moves(unit) or (self.sharding in ("Gradients", "Full") and self.data > 1)

    def keeps_gradient(self, unit: int) -> bool:
        """Whether the unit's update waits for the gradients of other units or ranks, so that its own is kept meanwhile;
        otherwise the update follows at once."""
        return self.clipping == "Global" or len(self.users[unit]) > 1

    @property
    def tied_blocks(self) -> int:
        """Number of blocks that are used on several pipeline ranks."""
        return sum(len(self.users[1 + block]) > 1 for block in {*self.layer_blocks})

    @cached_property
    def mesh(self) -> Mesh:
        """The ranks by their coordinates."""
        return Mesh(pipeline=self.pipeline, replica=self.replicas, shard=self.data // self.replicas)

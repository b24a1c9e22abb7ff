"""Which rank does what: the chain of positions, its units, and the mesh of pipeline and data ranks. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, pairwise
from typing import Literal

from pseudoreal_api.resolved.layers import sets_of
from pseudoreal_api.spec.optimizer import ClippingMode
from pseudoreal_api.spec.phase import Home, Schedule, StateSharding

from pseudoreal_trainer.plan.mesh import Groups, Mesh

Pool = Literal["Blocks", "Experts"]
POOLS: tuple[Pool, ...] = ("Blocks", "Experts")
"""Units that share the slots of a window, and the buffers of gradients, as they are about as large as each other: the
experts, and all others. Of each pool a pass uses one unit at most."""

Users = tuple[int, ...]
"""Pipeline ranks that use a unit, ascending."""

MODULAR: tuple[Schedule, ...] = ("Layered", "Interleaved")
"""Schedules whose layers go round the pipeline ranks; in the others each rank has neighbouring layers."""
_OF_LAYERS = (
    *("units", "_first_experts", "_behind_experts", "_sets", "_units_of", "_layers_of"),
    *("_ranks", "_positions", "_local_units", "users"),
)
"""What depends on the layers of the pipeline ranks alone."""


@dataclass(frozen=True)
class Layout:
    """Everything that the step plan of a phase depends on."""

    layer_blocks: tuple[int, ...]
    """Entry l is the block of layer l."""
    pipeline: int
    data: int
    """Number of data-parallel ranks of each pipeline rank."""
    micro_batches: int
    layer_experts: tuple[int | None, ...] = ()
    """Entry l is the number of the experts of layer l; None: it has none. Empty: no layer has."""
    replicas: int = 1
    """Number of groups of data ranks, in each of which all parts of a unit are; more than one where states are cut."""
    expert_ranks: int = 1
    """Number of ranks of a replica over which a layer's experts are spread."""
    expert_groups: int = 1
    """Number of groups of neighbouring experts into which a rank's experts of a layer are cut. Each is a unit, and one
    computes after the other."""
    order: Schedule = "Layered"
    sharding: StateSharding = "None"
    homes: tuple[Home, ...] = ()
    """Home of each unit. Empty: all are on the device."""
    window: int = 2
    """Most working copies of moving units at a time, of each pool."""
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
    balances_steps: bool = False
    """Whether a loss depends on how often each expert is chosen in the whole step."""

    def as_in(self, other: "Layout") -> "Layout":
        """This layout, knowing already what was found out about `other`: it has the same layers on the same pipeline
        ranks, so they differ in neither positions nor units nor users."""
        vars(self).update({name: vars(other)[name] for name in _OF_LAYERS if name in vars(other)})
        return self

    def with_homes(self, homes: tuple[Home, ...]) -> "Layout":
        return replace(self, homes=homes).as_in(self)

    @property
    def layers(self) -> int:
        return len(self.layer_blocks)

    @property
    def head(self) -> int:
        """The last position."""
        return self.layers + 1

    @cached_property
    def units(self) -> int:
        """Number of units: embedding, blocks, experts, and the head unless it is one with the embedding."""
        return self._behind_experts + (0 if self.ends_are_one else 1)

    @cached_property
    def _first_experts(self) -> int:
        """The unit behind the last block."""
        return max(self.layer_blocks) + 2

    @cached_property
    def _behind_experts(self) -> int:
        """The unit behind the last experts."""
        return self._first_experts + len(self._sets) * self.expert_groups

    @cached_property
    def _sets(self) -> list[int]:
        return sets_of(self.layer_experts)

    def block_unit(self, block: int) -> int:
        return 1 + block

    def experts_units(self, number: int) -> range:
        """The units of experts: their groups."""
        first = self._first_experts + self._sets.index(number) * self.expert_groups
        return range(first, first + self.expert_groups)

    def pool_of(self, unit: int) -> Pool:
        return "Experts" if self._first_experts <= unit < self._behind_experts else "Blocks"

    def group_of(self, unit: int) -> int:
        """Which group of a layer's experts the unit is."""
        return (unit - self._first_experts) % self.expert_groups

    def unit_of_model(self, unit: int) -> int:
        """Index of the unit among those of the model, where no experts are cut into groups."""
        if self.pool_of(unit) == "Experts":
            return self._first_experts + (unit - self._first_experts) // self.expert_groups
        return unit if unit < self._first_experts else unit - self._behind_experts + self._behind_whole_experts

    @property
    def _behind_whole_experts(self) -> int:
        return self._first_experts + len(self._sets)

    def units_of(self, position: int) -> tuple[int, ...]:
        """The units that a position uses: of a layer with experts, the block and then the groups of experts."""
        return self._units_of[position]

    @cached_property
    def _units_of(self) -> tuple[tuple[int, ...], ...]:
        layers = ((self.block_unit(b), *self._experts_in(layer)) for layer, b in enumerate(self.layer_blocks))
        return ((0,), *layers, (0 if self.ends_are_one else self.units - 1,))

    def _experts_in(self, layer: int) -> Sequence[int]:
        number = self.layer_experts[layer] if self.layer_experts else None
        return () if number is None else self.experts_units(number)

    def shared_units(self, position: int) -> tuple[int, ...]:
        """Those of a layer's units that other layers use as well."""
        return tuple(unit for unit in self._units_of[position] if len(self._layers_of[unit]) > 1)

    def position_above(self, position: int) -> int | None:
        """The next position whose layer shares units with this one; None where there is none."""
        return self._neighbours.get(position)

    def position_below(self, position: int) -> int | None:
        return self._lower_neighbours.get(position)

    def shares(self, position: int) -> bool:
        """Whether another layer uses a unit of this position."""
        return bool(self.shared_units(position))

    @cached_property
    def _layers_of(self) -> tuple[tuple[int, ...], ...]:
        """For each unit the positions of the layers that use it, ascending."""
        found: list[list[int]] = [[] for _ in range(self.units)]
        for position in range(1, self.head):
            for unit in self.units_of(position):
                found[unit].append(position)
        return tuple(map(tuple, found))

    @cached_property
    def _neighbours(self) -> dict[int, int]:
        # Where layers share both units, they share them with the same layers.
        return {below: above for positions in self._layers_of for below, above in pairwise(positions)}

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
        if self.order in MODULAR:
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
        found = (chain.from_iterable(map(self.units_of, positions)) for positions in self._positions)
        return tuple(tuple(dict.fromkeys(units)) for units in found)

    def moving_units(self, rank: int, pool: Pool) -> tuple[int, ...]:
        """Units of a pipeline rank whose working copies come and go."""
        return self._local_in(pool, rank, self.moves)

    def slots(self, rank: int, pool: Pool) -> int:
        """Number of working copies that the window of a pipeline rank holds: never more than there are to hold."""
        return min(self.window, len(self.moving_units(rank, pool)))

    def buffered_units(self, rank: int, pool: Pool) -> tuple[int, ...]:
        """Units of a pipeline rank whose gradients grow in buffers that they share."""
        return self._local_in(pool, rank, self.has_gradient_shard)

    def _local_in(self, pool: Pool, rank: int, counts: Callable[[int], bool]) -> tuple[int, ...]:
        return tuple(unit for unit in self.local_units(rank) if self.pool_of(unit) == pool and counts(unit))

    @cached_property
    def users(self) -> tuple[Users, ...]:
        """For each unit the pipeline ranks that use it."""
        found: list[set[int]] = [set() for _ in range(self.units)]
        for position in range(self.head + 1):
            for unit in self.units_of(position):
                found[unit].add(self.rank_of(position))
        return tuple(tuple(sorted(ranks)) for ranks in found)

    def is_common(self, unit: int) -> bool:
        """Whether several pipeline ranks use the unit. Its state is cut into parts of all of their ranks, whatever
        `sharding` says; all of them gather its working copy at the begin of a step, and it stays until the end."""
        return len(self.users[unit]) > 1

    def common_units(self, rank: int) -> tuple[int, ...]:
        """The common units of a pipeline rank, ascending: in this order all ranks gather and reduce them."""
        return tuple(filter(self.is_common, sorted(self.local_units(rank))))

    def home(self, unit: int) -> Home:
        return self.homes[unit] if self.homes else "Device"

    def spreads(self, position: int) -> bool:
        """Whether tokens go to the experts of a position and come back, as these are spread over ranks, or come and go
        in groups. A rank that has all of them exchanges tokens with itself."""
        return self.expert_ranks * self.expert_groups > 1 and self.has_experts(position)

    def asks_for_groups(self, position: int) -> bool:
        """Whether some group of the position's experts is fetched only where tokens came for it."""
        return any(map(self.is_optional, self.units_of(position)))

    def is_optional(self, unit: int) -> bool:
        """Whether the unit is a group of experts that is fetched only where tokens came for it."""
        return self.expert_groups > 1 and self.pool_of(unit) == "Experts" and self.moves(unit)

    def sums_choices(self, position: int) -> bool:
        """Whether the backward passes of a position need the choices of all its forward passes."""
        return self.balances_steps and self.has_experts(position)

    def has_experts(self, position: int) -> bool:
        return len(self.units_of(position)) > 1

    def data_holders(self, unit: int) -> int:
        """Number of data ranks of a pipeline rank that have the same elements of a unit: all, but of spread experts."""
        return self.data // self.expert_ranks if self.pool_of(unit) == "Experts" else self.data

    def holders(self, unit: int) -> int:
        """Number of ranks that have the same elements of a unit, on all pipeline ranks that use it."""
        return self.data_holders(unit) * len(self.users[unit])

    def data_part(self, unit: int, world_rank: int) -> int:
        """Which of the equal parts of a unit, as many as its data holders, a rank has of what these sum."""
        return self.mesh.expert_part(world_rank) if self.pool_of(unit) == "Experts" else self.mesh.part(world_rank)

    def part(self, unit: int, world_rank: int) -> int:
        """Which of the equal parts of a unit, as many as holders, a rank that uses it has where states are split."""
        user = self.users[unit].index(self.mesh.coordinates(world_rank).pipeline)
        return user * self.data_holders(unit) + self.data_part(unit, world_rank)

    def groups_of_replica(self, pool: Pool, users: Users) -> Groups:
        """The groups of ranks of a replica that have the same elements of a unit of that pool which these pipeline
        ranks use. In a group, ranks are in the order of their parts."""
        mesh = self.mesh
        groups = mesh.expert_groups("expert_shard") if pool == "Experts" else mesh.groups("shard")
        return mesh.at_each_pipeline(groups, users)

    def shards(self, unit: int) -> int:
        """Number of parts into which its holders split the state of a unit. A unit that moves has no whole copy
        anywhere."""
        return 1 if self.sharding == "None" and not self.is_common(unit) else self.holders(unit)

    @property
    def parts_of_replica(self) -> int:
        """Number of neighbouring parts of a state that ranks with one place in all replicas have together."""
        return 1 if self.sharding == "None" else self.replicas

    def holds_whole(self, unit: int) -> bool:
        """Whether each data rank has all of the unit's state."""
        return self.shards(unit) == 1 and self.holders(unit) == self.data

    def moves(self, unit: int) -> bool:
        """Whether the unit's working copy exists in the window only."""
        if self.is_common(unit):
            return False
        return self.home(unit) != "Device" or (self.sharding == "Full" and self.holders(unit) > 1)

    def refreshed(self, unit: int) -> bool:
        """Whether the unit's working copy stays, and is gathered from the updated shards once a step."""
        return not self.moves(unit) and self.shards(unit) > 1

    def has_gradient_shard(self, unit: int) -> bool:
        """Whether the unit's gradient is whole only until it is reduced."""
        return self.home(unit) != "Device" or (self.sharding in ("Gradients", "Full") and self.holders(unit) > 1)

    @property
    def keeps_gradients(self) -> bool:
        """Whether updates wait for the gradients of all units, which are kept meanwhile; otherwise each follows at
        once."""
        return self.clipping == "Global"

    @property
    def common_layer_units(self) -> int:
        """Number of blocks and experts that are used on several pipeline ranks."""
        return sum(self.is_common(unit) for unit, layers in enumerate(self._layers_of) if layers)

    @cached_property
    def mesh(self) -> Mesh:
        """The ranks by their coordinates."""
        return Mesh(
            pipeline=self.pipeline,
            replica=self.replicas,
            shard=self.data // self.replicas,
            expert=self.expert_ranks,
        )

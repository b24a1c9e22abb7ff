"""Assignment of work to ranks: the chain of positions, its units, and the mesh of pipeline and data ranks. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, pairwise
from typing import Literal

from pseudoreal_api.resolved.layers import MODULAR, sets_of
from pseudoreal_api.spec.optimizer import ClippingMode
from pseudoreal_api.spec.phase import Home, Keep, Schedule, StateSharding

from pseudoreal_trainer.plan.mesh import Fold, Groups, Mesh

Pool = Literal["Blocks", "Experts"]
POOLS: tuple[Pool, ...] = ("Blocks", "Experts")
"""Pools of units: experts, and all other units. The units of a pool have similar sizes, and share the slots of a window
and the gradient buffers. A pass uses at most one unit of each pool."""

Users = tuple[int, ...]
"""Pipeline ranks that use a unit, ascending."""

_OF_LAYERS = (
    *("units", "_first_experts", "_after_experts", "_sets", "_units_of", "_layers_of"),
    *("_ranks", "_positions", "_local_units", "users"),
)
"""Cached properties that depend only on the layers of the pipeline ranks."""


@dataclass(frozen=True)
class Layout:
    """Layout of a phase: everything that the phase's step plan depends on."""

    layer_blocks: tuple[int, ...]
    """Entry l is the index of layer l's block."""
    pipeline: int
    data: int
    """Number of data ranks of each pipeline rank: ranks with different tokens."""
    micro_batches: int
    layer_experts: tuple[int | None, ...] = ()
    """Entry l is the number that identifies the experts of layer l; None: the layer has none. Empty: no layer has
    experts."""
    replicas: int = 1
    """Number of groups of data ranks for hierarchical collectives; more than one only if states are sharded."""
    expert_ranks: int = 1
    """Number of ranks of a replica over which a layer's experts are spread (expert parallelism)."""
    context_ranks: int = 1
    """Number of context ranks: ranks of a replica with different parts of the same sequences (context parallelism)."""
    tensor_ranks: int = 1
    """Number of tensor ranks: ranks of a replica with slices of the matrices of each layer (tensor parallelism). They
    divide the tokens of a context rank among them."""
    expert_groups: int = 1
    """Number of groups of neighbouring experts into which a rank's experts of a layer are cut. Each group is a unit,
    and the groups compute one after the other."""
    order: Schedule = "Layered"
    sharding: StateSharding = "None"
    homes: tuple[Home, ...] = ()
    """Home of each unit; empty: all units are on the device."""
    window: int = 2
    """Size of the window: maximum number of working copies of streamed units at a time, per pool."""
    keep: Keep = "Inputs"
    """Activations that are kept for the backward pass."""
    sequence_chunks: int = 1
    """Number of chunks of the sequence, computed one after the other in dense layers; more than one only if blocks are
    recomputed."""
    stash: bool = False
    """Whether boundary activations are offloaded to the host."""
    clipping: ClippingMode = "Global"
    speculates: bool = False
    """Whether updates of units in host memory may start before the norm of the gradient is known; only with global
    clipping."""
    ends_are_one: bool = False
    """Whether embedding and head are in one unit."""
    vocabulary: int = 1
    """Number of rows of the matrices of embedding and head."""
    loss_chunk: int | None = None
    """Maximum number of tokens per chunk of the loss; None: one chunk. Logits are in memory for one chunk at a time."""
    measures: bool = False
    """Whether some steps measure the gradients of single layers that share a block."""
    balances_steps: bool = False
    """Whether a loss depends on how often each expert is chosen in the whole step."""

    def __post_init__(self) -> None:
        assert self.sequence_chunks == 1 or self.recompute, "the job's rules allow chunks with kept inputs only"

    def as_in(self, other: "Layout") -> "Layout":
        """Return this layout with the cached properties of `other` that depend on layers and pipeline ranks only. Both
        layouts must have the same layers on the same pipeline ranks, and so the same positions, units and users."""
        vars(self).update({name: vars(other)[name] for name in _OF_LAYERS if name in vars(other)})
        return self

    def with_homes(self, homes: tuple[Home, ...]) -> "Layout":
        return replace(self, homes=homes).as_in(self)

    @property
    def recompute(self) -> bool:
        """Whether backward passes recompute the forward passes of whole blocks."""
        return self.keep == "Inputs"

    @property
    def layers(self) -> int:
        return len(self.layer_blocks)

    @property
    def head(self) -> int:
        """Last position: final norm, head and loss."""
        return self.layers + 1

    @cached_property
    def units(self) -> int:
        """Number of units: embedding, blocks, experts, and the head unless it is in one unit with the embedding."""
        return self._after_experts + (0 if self.ends_are_one else 1)

    @cached_property
    def _first_experts(self) -> int:
        """Index of the unit after the last block."""
        return max(self.layer_blocks) + 2

    @cached_property
    def _after_experts(self) -> int:
        """Index of the unit after the last experts."""
        return self._first_experts + len(self._sets) * self.expert_groups

    @cached_property
    def _sets(self) -> list[int]:
        return sets_of(self.layer_experts)

    def block_unit(self, block: int) -> int:
        return 1 + block

    def experts_units(self, number: int) -> range:
        """Return the units of these experts, one per group."""
        first = self._first_experts + self._sets.index(number) * self.expert_groups
        return range(first, first + self.expert_groups)

    def pool_of(self, unit: int) -> Pool:
        return "Experts" if self._first_experts <= unit < self._after_experts else "Blocks"

    def group_of(self, unit: int) -> int:
        """Return the index of the unit's group among the groups of a layer's experts."""
        return (unit - self._first_experts) % self.expert_groups

    def unit_of_model(self, unit: int) -> int:
        """Return the unit's index among the units of the model, where experts are not cut into groups."""
        if self.pool_of(unit) == "Experts":
            return self._first_experts + (unit - self._first_experts) // self.expert_groups
        return unit if unit < self._first_experts else unit - self._after_experts + self._after_whole_experts

    @property
    def _after_whole_experts(self) -> int:
        return self._first_experts + len(self._sets)

    def units_of(self, position: int) -> tuple[int, ...]:
        """Return the units that a position uses; for a layer with experts, the block and then the groups of experts."""
        return self._units_of[position]

    @cached_property
    def _units_of(self) -> tuple[tuple[int, ...], ...]:
        layers = ((self.block_unit(b), *self._experts_in(layer)) for layer, b in enumerate(self.layer_blocks))
        return ((0,), *layers, (0 if self.ends_are_one else self.units - 1,))

    def _experts_in(self, layer: int) -> Sequence[int]:
        number = self.layer_experts[layer] if self.layer_experts else None
        return () if number is None else self.experts_units(number)

    def shared_units(self, position: int) -> tuple[int, ...]:
        """Return the units of a layer that other layers use as well."""
        return tuple(unit for unit in self._units_of[position] if len(self._layers_of[unit]) > 1)

    def position_above(self, position: int) -> int | None:
        """Return the next position above with a layer that shares units with this position's layer; None if there is
        none."""
        return self._neighbours.get(position)

    def position_below(self, position: int) -> int | None:
        return self._lower_neighbours.get(position)

    def shares(self, position: int) -> bool:
        """Return whether another layer uses a unit of this position."""
        return bool(self.shared_units(position))

    @cached_property
    def _layers_of(self) -> tuple[tuple[int, ...], ...]:
        """Entry i: the positions of the layers that use unit i, ascending."""
        found: list[list[int]] = [[] for _ in range(self.units)]
        for position in range(1, self.head):
            for unit in self.units_of(position):
                found[unit].append(position)
        return tuple(map(tuple, found))

    @cached_property
    def _neighbours(self) -> dict[int, int]:
        # Layers that share both units share both with the same layers, so a position has one neighbour.
        return {below: above for positions in self._layers_of for below, above in pairwise(positions)}

    @cached_property
    def _lower_neighbours(self) -> dict[int, int]:
        return {above: below for below, above in self._neighbours.items()}

    def rank_of(self, position: int) -> int:
        """Return the pipeline rank of a position. The embedding is on the rank of the first layer and the head on the
        rank of the last, so messages travel only between layers."""
        return self._ranks[position]

    @cached_property
    def _ranks(self) -> tuple[int, ...]:
        """Pipeline rank of each position."""
        layers = range(self.layers)
        if self.order in MODULAR:
            ranks = [layer % self.pipeline for layer in layers]
        else:
            ranks = [layer * self.pipeline // self.layers for layer in layers]
        return (ranks[0], *ranks, ranks[-1])

    def positions(self, rank: int) -> tuple[int, ...]:
        """Return the positions of a pipeline rank, ascending."""
        return self._positions[rank]

    @cached_property
    def _positions(self) -> tuple[tuple[int, ...], ...]:
        found: list[list[int]] = [[] for _ in range(self.pipeline)]
        for position, rank in enumerate(self._ranks):
            found[rank].append(position)
        return tuple(map(tuple, found))

    def local_units(self, rank: int) -> tuple[int, ...]:
        """Return the units that a pipeline rank uses, in the order of their first use."""
        return self._local_units[rank]

    @cached_property
    def _local_units(self) -> tuple[tuple[int, ...], ...]:
        found = (chain.from_iterable(map(self.units_of, positions)) for positions in self._positions)
        return tuple(tuple(dict.fromkeys(units)) for units in found)

    def moving_units(self, rank: int, pool: Pool) -> tuple[int, ...]:
        """Return the streamed units of a pipeline rank in this pool."""
        return self._local_in(pool, rank, self.moves)

    def slots(self, rank: int, pool: Pool) -> int:
        """Return the number of window slots of a pipeline rank; never more than it has streamed units."""
        return min(self.window, len(self.moving_units(rank, pool)))

    def buffered_units(self, rank: int, pool: Pool) -> tuple[int, ...]:
        """Return the units of a pipeline rank whose gradients accumulate in shared buffers."""
        return self._local_in(pool, rank, self.has_gradient_shard)

    def _local_in(self, pool: Pool, rank: int, counts: Callable[[int], bool]) -> tuple[int, ...]:
        return tuple(unit for unit in self.local_units(rank) if self.pool_of(unit) == pool and counts(unit))

    @cached_property
    def users(self) -> tuple[Users, ...]:
        """Entry i: the pipeline ranks that use unit i, ascending."""
        found: list[set[int]] = [set() for _ in range(self.units)]
        for position in range(self.head + 1):
            for unit in self.units_of(position):
                found[unit].add(self.rank_of(position))
        return tuple(tuple(sorted(ranks)) for ranks in found)

    def is_common(self, unit: int) -> bool:
        """Return whether several pipeline ranks use the unit (cross-stage unit).

        The state of a cross-stage unit is sharded over its holders on all of these pipeline ranks, whatever `sharding`
        says. The holders gather the working copy at the start of a step, and keep the copy until the end of the step.
        """
        return len(self.users[unit]) > 1

    def common_units(self, rank: int) -> tuple[int, ...]:
        """Return the cross-stage units of a pipeline rank, ascending: all ranks gather and reduce them in this
        order."""
        return tuple(filter(self.is_common, sorted(self.local_units(rank))))

    def home(self, unit: int) -> Home:
        return self.homes[unit] if self.homes else "Device"

    def spreads(self, position: int) -> bool:
        """Return whether a position has experts that are spread over ranks or cut into groups. Exchanges then carry
        tokens to these experts and back; a rank that has all experts exchanges tokens with itself."""
        return self.expert_ranks * self.expert_groups > 1 and self.has_experts(position)

    def asks_for_groups(self, position: int) -> bool:
        """Return whether some group of the position's experts is fetched only if tokens are routed to it."""
        return any(map(self.is_optional, self.units_of(position)))

    def is_optional(self, unit: int) -> bool:
        """Return whether the unit is a group of experts that is fetched only if tokens are routed to it."""
        return self.expert_groups > 1 and self.pool_of(unit) == "Experts" and self.moves(unit)

    def sums_choices(self, position: int) -> bool:
        """Return whether the backward passes of a position need the choices of all its forward passes."""
        return self.balances_steps and self.has_experts(position)

    def is_dense(self, position: int) -> bool:
        """Return whether the position is a layer without experts."""
        return 0 < position < self.head and not self.has_experts(position)

    def has_experts(self, position: int) -> bool:
        return len(self.units_of(position)) > 1

    @property
    def sequence_ranks(self) -> int:
        """Number of ranks that divide the tokens of each sequence among them."""
        return self.context_ranks * self.tensor_ranks

    @property
    def slices_vocabulary(self) -> bool:
        """Whether tensor ranks have slices of the embedding and of the head."""
        return self.tensor_ranks > 1 and self.vocabulary % self.tensor_ranks == 0

    def fold_of(self, unit: int) -> Fold:
        """Return the fold of the mesh over which the unit's state is sharded."""
        if self.pool_of(unit) == "Experts":
            return "Experts" if self.expert_ranks > 1 else "None"
        is_end = unit == 0 or unit >= self._after_experts
        is_sliced = self.slices_vocabulary if is_end else self.tensor_ranks > 1
        return "Tensors" if is_sliced else "None"

    @cached_property
    def folds(self) -> tuple[Fold, ...]:
        """Folds of all units."""
        return tuple(dict.fromkeys(map(self.fold_of, range(self.units))))

    def data_holders(self, unit: int) -> int:
        """Return the number of data ranks of a pipeline rank that hold the unit: all data ranks; for spread experts and
        sliced blocks, the ranks with the same experts or slices."""
        return self.fold_holders(self.fold_of(unit))

    def fold_holders(self, fold: Fold) -> int:
        """Return `data_holders` of any unit of this fold."""
        return self.data // self.mesh.fold_size(fold)

    def holders(self, unit: int) -> int:
        """Return the number of ranks that hold the unit, on all pipeline ranks that use it."""
        return self.data_holders(unit) * len(self.users[unit])

    def data_part(self, unit: int, world_rank: int) -> int:
        """Return the index of a rank's part of a unit that is cut into equal parts, one for each of a pipeline rank's
        data ranks that hold the unit."""
        return self.mesh.part_in(self.fold_of(unit), world_rank)

    def part(self, unit: int, world_rank: int) -> int:
        """Return the index of a rank's shard of a unit that is cut into equal parts, one for each rank that holds the
        unit. The rank must use the unit."""
        user = self.users[unit].index(self.mesh.coordinates(world_rank).pipeline)
        return user * self.data_holders(unit) + self.data_part(unit, world_rank)

    def groups_of_replica(self, fold: Fold, users: Users) -> Groups:
        """Return the groups of ranks inside a replica that hold the same units of this fold, for units that these
        pipeline ranks use. In a group, ranks are in the order of their shards."""
        return self.mesh.at_each_pipeline(self.mesh.holders_in_replica(fold), users)

    def shards(self, unit: int) -> int:
        """Return the number of shards of the unit's state; 1: the state is not sharded. A streamed unit with several
        shards has no whole copy outside the windows."""
        return 1 if self.sharding == "None" and not self.is_common(unit) else self.holders(unit)

    @property
    def parts_of_replica(self) -> int:
        """Number of consecutive shards held by ranks with the same index in their replicas, one rank per replica."""
        return 1 if self.sharding == "None" else self.replicas

    def holds_whole(self, unit: int) -> bool:
        """Return whether each data rank has all of the unit's state."""
        return self.shards(unit) == 1 and self.holders(unit) == self.data

    def moves(self, unit: int) -> bool:
        """Return whether the unit is streamed: its working copy exists in the window only."""
        if self.is_common(unit):
            return False
        return self.home(unit) != "Device" or (self.sharding == "Full" and self.holders(unit) > 1)

    def refreshed(self, unit: int) -> bool:
        """Return whether the unit's working copy is resident, and gathered from the updated shards once a step."""
        return not self.moves(unit) and self.shards(unit) > 1

    def has_gradient_shard(self, unit: int) -> bool:
        """Return whether the device has the whole gradient of the unit only until the reduction. Afterwards each rank
        keeps its shard of the gradient, in the unit's home."""
        return self.home(unit) != "Device" or (self.sharding in ("Gradients", "Full") and self.holders(unit) > 1)

    @property
    def keeps_gradients(self) -> bool:
        """Whether the gradients of all units are kept until the updates start. Otherwise each update follows its
        reduction at once."""
        return self.clipping == "Global"

    def is_speculative(self, unit: int) -> bool:
        """Return whether the unit's update may start before the norm is known.

        Only a unit in host memory may: on a device, an early update would take memory bandwidth from the passes; on a
        disk, an undone update would write the state twice.
        """
        return self.has_speculation and self.home(unit) == "Host"

    @property
    def has_speculation(self) -> bool:
        """Whether updates may start before the norm is known, if their units are in host memory."""
        return self.speculates and self.keeps_gradients

    @property
    def common_layer_units(self) -> int:
        """Number of units of blocks and experts that several pipeline ranks use."""
        return sum(self.is_common(unit) for unit, layers in enumerate(self._layers_of) if layers)

    @cached_property
    def mesh(self) -> Mesh:
        """Coordinates and groups of all ranks."""
        return Mesh(
            pipeline=self.pipeline,
            replica=self.replicas,
            shard=self.data // self.replicas,
            expert=self.expert_ranks,
            context=self.context_ranks,
            tensor=self.tensor_ranks,
        )

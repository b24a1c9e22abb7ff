"""Gradient-similarity probe: measures, in one training step, the gradients of single layers that share blocks.

The probe accumulates the gradient of each layer separately, until the layer's last micro-batch. Only statistics are
kept: squares of each tensor's gradient, for the blocks of this phase and of the next, and cosines between neighbouring
layers (Yang et al., "Speeding up deep learning training by sharing weights and then unsharing", arXiv 2110.03848: the
adaptive rule).

Each data rank holds one shard of each gradient, each pipeline rank the gradients of its own layers. The statistics of
all ranks are summed once, at the end.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import accumulate, chain
from math import isfinite, nan, sqrt

import torch
import torch.distributed as dist
from pseudoreal_api.resolved.layers import sets_of
from torch import Tensor

from pseudoreal_trainer.engine.gradients import GradientAccumulator
from pseudoreal_trainer.engine.norms import dot
from pseudoreal_trainer.engine.ranks.process_groups import ProcessGroups
from pseudoreal_trainer.model.modules import Modules
from pseudoreal_trainer.plan.layout import Layout
from pseudoreal_trainer.plan.parts import by_expert, parts_of, units_of_rank
from pseudoreal_trainer.plan.units import Parameter, Unit


@dataclass(frozen=True)
class LayerGradients:
    """Measurements of one step, from gradients that are summed over all ranks and not clipped."""

    shared: dict[str, list[float]]
    """Tensor of a shared block -> sum of the squares of its gradient: one number, or one per expert of a stacked
    tensor."""
    single: dict[str, list[float]]
    """Tensor of a shared block -> sum of the squares of a smaller block's gradient, averaged over the blocks into which
    the next phase splits the shared block. A list as in `shared`."""
    correlations: tuple[float, ...]
    """Cosines between the gradients of neighbouring layers of a block, lowest layers first; NaN if a gradient is not
    finite."""

    @property
    def are_finite(self) -> bool:
        return all(map(isfinite, chain(*self.shared.values(), *self.single.values(), self.correlations)))


@dataclass(frozen=True)
class LayerGroup:
    """Layers that share a block or experts, in this phase or in the next. The gradient of the block is the sum of the
    layers' gradients."""

    units: tuple[int, ...]
    """Units that the layers share in this phase: a block, or the groups of experts."""
    positions: tuple[int, ...]
    """Positions of the layers, ascending."""
    is_shared: bool
    """True if the layers share the units in this phase; `positions` then lists all layers of the units."""


def groups_of(
    layout: Layout, next_blocks: Sequence[int], next_experts: Sequence[int | None] = ()
) -> tuple[LayerGroup, ...]:
    """Return the groups of layers that share a block, in this phase and in the next, then the groups of layers that
    share experts. Pure.

    `next_blocks`, `next_experts`: entry l is the number of the block or the experts of layer l in the next phase.
    Layers that share nothing in this phase are in no group.
    """
    return (
        *_groups(lambda block: (layout.block_unit(block),), layout.layer_blocks, next_blocks),
        *_groups(lambda number: tuple(layout.experts_units(number)), layout.layer_experts, next_experts),
    )


def _groups(
    units_of: Callable[[int], tuple[int, ...]], now: Sequence[int | None], later: Sequence[int | None]
) -> Iterator[LayerGroup]:
    """Yield the groups. Entry l of `now` and `later`: number of the block or experts of layer l in this or the next
    phase."""
    shared = {number: positions for number, positions in _positions(now).items() if len(positions) > 1}
    for number, positions in shared.items():
        yield LayerGroup(units_of(number), positions, True)
    number_at = {position: number for number, positions in shared.items() for position in positions}
    for positions in _positions(later).values():
        if positions[0] in number_at:
            yield LayerGroup(units_of(number_at[positions[0]]), positions, False)


def _positions(numbers: Sequence[int | None]) -> dict[int, tuple[int, ...]]:
    """Return number of a block or of experts -> positions of the layers that use it. Numbers and positions are
    ascending."""
    return {
        number: tuple(position for position, used in enumerate(numbers, start=1) if used == number)
        for number in sets_of(numbers)
    }


class SimilarityProbe:
    """Measures the gradients of one step on one rank. All ranks call the methods in the order of their plans."""

    def __init__(
        self,
        groups: ProcessGroups,
        units: Sequence[Unit],
        modules: Modules,
        dtype: torch.dtype,
        layer_groups: tuple[LayerGroup, ...],
    ) -> None:
        """`units`: units of the model, each with all of its experts. `dtype`: dtype of the gradients. `layer_groups`:
        empty if only the gradients of neighbouring layers are compared."""
        self._groups, self._modules, self._dtype = groups, modules, dtype
        self._units = units_of_rank(groups.layout, units, groups.ranks.rank)
        self._accumulators: dict[tuple[int, int], GradientAccumulator] = {}
        """(position, unit) -> accumulated gradient of the micro-batches so far."""
        self._squares = GroupSquares(groups, units, layer_groups, dtype)
        self._cosines = NeighbourCosines(groups)

    def accumulate(self, position: int, unit: int, gradients: Sequence[Tensor | None]) -> None:
        """Add the gradients of one micro-batch for one of the position's units. `gradients`: one per parameter of the
        unit, in order."""
        if unit not in self._groups.layout.shared_units(position):
            return
        if (position, unit) not in self._accumulators:
            self._accumulators[position, unit] = self._new_accumulator(unit)
        self._accumulators[position, unit].add(gradients)

    def measure(self, position: int) -> None:
        """Reduce and measure the gradients of a position after its last micro-batch. Call this for positions from the
        top down. Collective over the data ranks of a pipeline rank."""
        for unit in self._groups.layout.shared_units(position):
            gradient = self._reduce(position, unit)
            self._squares.add(position, unit, gradient)
            self._cosines.add(position, unit, gradient)

    def result(self) -> LayerGradients:
        """Return the measurements of the step, the same on every rank. Collective: every rank calls this after the
        step."""
        self._cosines.wait_for_sends()
        self._squares.sum_over_pipeline()
        squares, products = self._squares.squares, self._cosines.products
        # One all-reduce for all numbers: all ranks have the same groups and pairs in the same order.
        numbers = self._groups.ranks.sum_(torch.cat([squares.flatten(), products.flatten()]))
        of_groups, of_pairs = numbers.split([squares.numel(), products.numel()])
        squared: list[list[float]] = of_groups.view(squares.shape).tolist()
        return LayerGradients(
            shared=self._squares.means(squared, are_shared=True),
            single=self._squares.means(squared, are_shared=False),
            correlations=tuple(_cosine(*pair) for pair in of_pairs.view(products.shape).tolist()),
        )

    def _new_accumulator(self, unit: int) -> GradientAccumulator:
        parts = self._groups.layout.data_holders(unit)
        padded = self._units[unit].shard_length(parts) * parts
        flat = torch.empty(padded, dtype=self._dtype, device=self._groups.device)
        return GradientAccumulator(flat, self._modules.of(unit).views(flat))

    def _reduce(self, position: int, unit: int) -> Tensor:
        """Return this data rank's shard of the position's gradient, summed over the ranks of this pipeline rank that
        hold the unit, [shard]."""
        flat, unit_groups = self._accumulators.pop((position, unit)).complete(), self._groups.data_unit_groups(unit)
        # The data ranks of a pipeline rank have one plan, so they finish positions and reduce units in one order.
        for group in filter(None, (unit_groups.intra, unit_groups.inter)):
            part = torch.empty(len(flat) // group.size(), dtype=flat.dtype, device=flat.device)
            with _waiting(self._groups, f"the sum of layer {position}"):
                dist.reduce_scatter_tensor(part, flat, group=group)
            flat = part
        return flat


class GroupSquares:
    """Sums of the squares of the groups' gradients: one per tensor of the shared units, or one per expert of a stacked
    tensor."""

    def __init__(
        self, groups: ProcessGroups, units: Sequence[Unit], layer_groups: tuple[LayerGroup, ...], dtype: torch.dtype
    ) -> None:
        self._groups, self._layer_groups, self._dtype = groups, layer_groups, dtype
        self._own = units_of_rank(groups.layout, units, groups.ranks.rank)
        self._parameters = {
            group: units[groups.layout.unit_of_model(group.units[0])].parameters for group in layer_groups
        }
        """Group -> parameters of the shared unit, with all experts."""
        self._sums: dict[tuple[LayerGroup, int], Tensor] = {}
        """(group, unit) -> sum of the gradients of this rank's layers so far, [shard]; removed once the sum is
        squared."""
        most = max((sum(map(_sum_count, parameters)) for parameters in self._parameters.values()), default=0)
        self.squares = torch.zeros(len(layer_groups), most, dtype=torch.float64, device=groups.device)
        """Sums of squares over this data rank's shard, [groups, sums]. One pipeline rank has the values of a group, the
        others have zeros. Rows with fewer sums than others end with zeros."""

    def add(self, position: int, unit: int, gradient: Tensor) -> None:
        """Add the gradient of one of the position's units, [shard]. Call this for positions from the top down."""
        for row, group in enumerate(self._layer_groups):
            if unit not in group.units or position not in group.positions:
                continue
            # Not in place: the gradient may belong to other groups as well.
            key = (group, unit)
            self._sums[key] = self._sums[key] + gradient if key in self._sums else gradient
            if position == group.positions[0] and len(self._ranks(group)) == 1:
                self._add(row, self._squared(group, unit, self._sums.pop(key)))

    def sum_over_pipeline(self) -> None:
        """Finish the sums of groups with layers on several pipeline ranks. Collective over the pipeline ranks."""
        for row, group in enumerate(self._layer_groups):
            ranks = self._ranks(group)
            for unit in group.units if len(ranks) > 1 else ():
                total = torch.zeros(self._shard_length(unit), dtype=self._dtype, device=self._groups.device)
                if (group, unit) in self._sums:
                    total += self._sums.pop((group, unit))
                # Every pipeline rank takes part, even without a layer of the group: the ranks share one communicator,
                # and all of them walk the groups in one order, after their last message on it.
                with _waiting(self._groups, f"the sum of unit {unit}"):
                    dist.all_reduce(total, group=self._groups.probe)
                if self._groups.pipeline_rank == min(ranks):
                    self._add(row, self._squared(group, unit, total))

    def means(self, squares: list[list[float]], *, are_shared: bool) -> dict[str, list[float]]:
        """Return tensor of a shared unit -> its sums of squares, averaged over the unit's groups of this phase if
        `are_shared`, else of the next phase. `squares`: sums over all ranks, [groups, sums]."""
        found: dict[str, list[list[float]]] = {}
        for group, values in zip(self._layer_groups, squares, strict=True):
            if group.is_shared == are_shared:
                parameters = self._parameters[group]
                for parameter, begin in zip(parameters, _offsets(parameters), strict=True):
                    if not parameter.is_balancing:
                        found.setdefault(parameter.name, []).append(values[begin : begin + _sum_count(parameter)])
        return {
            name: [sum(of_groups) / len(of_groups) for of_groups in zip(*values, strict=True)]
            for name, values in found.items()
        }

    def _add(self, row: int, squares: Tensor) -> None:
        self.squares[row, : len(squares)] += squares

    def _ranks(self, group: LayerGroup) -> set[int]:
        """Return the pipeline ranks that have layers of the group."""
        return {self._groups.layout.rank_of(position) for position in group.positions}

    def _shard_length(self, unit: int) -> int:
        return self._own[unit].shard_length(self._groups.layout.data_holders(unit))

    def _squared(self, group: LayerGroup, unit: int, gradient: Tensor) -> Tensor:
        """Return the sums of squares of a unit's gradient over this data rank's shard, [sums], float64. One sum per
        tensor, or per expert of a stacked tensor; 0 for tensors outside the shard. `gradient`: [shard]."""
        parameters = self._parameters[group]
        layout = self._groups.layout
        shard = self._own[unit].shard(layout.data_part(unit, self._groups.ranks.rank), layout.data_holders(unit))
        own = {part.name: part for part in parts_of(self._own[unit], shard)}
        squares = torch.zeros(sum(map(_sum_count, parameters)), dtype=torch.float64, device=gradient.device)
        for parameter, column in zip(parameters, _offsets(parameters), strict=True):
            if (part := own.get(parameter.name)) is not None:
                shift = part.offset - shard.start - part.begin
                for number, elements in by_expert(part.begin, part.end, parameter.numel // _sum_count(parameter)):
                    of_one = gradient[elements.start + shift : elements.stop + shift]
                    squares[column + number] = dot(of_one, of_one)
        return squares


def _sum_count(parameter: Parameter) -> int:
    """Return the number of sums for a tensor: one, or one per expert of a stacked tensor."""
    return 1 if parameter.experts is None else len(parameter.experts)


def _offsets(parameters: Sequence[Parameter]) -> list[int]:
    """Return the index of each parameter's first sum, among the sums of all parameters."""
    return [*accumulate(map(_sum_count, parameters[:-1]), initial=0)]


class NeighbourCosines:
    """Dot products of the gradients of neighbouring layers of a block or of experts, for computing the cosines.

    The finished gradient of a layer is compared with the gradient of the next layer above that uses the same units. The
    layer above always finishes earlier.
    """

    def __init__(self, groups: ProcessGroups) -> None:
        self._groups = groups
        self._above: dict[tuple[int, int], Tensor] = {}
        """(position, unit) -> gradient, [shard], of the next layer above with this unit, if that layer is on this
        rank."""
        self._sent: list[tuple[dist.Work, Tensor]] = []
        """(send in flight, its gradient). The memory of a gradient must not be freed before its send is done."""
        pairs = [p for p in range(1, groups.layout.head) if groups.layout.position_above(p) is not None]
        self._rows = {position: row for row, position in enumerate(pairs)}
        """Position of the lower layer of a pair -> row of `products`."""
        self.products = torch.zeros(len(pairs), 3, dtype=torch.float64, device=groups.device)
        """[pairs, 3], lowest layers first: squared norm of the lower gradient, squared norm of the upper gradient, and
        their dot product, over this data rank's shard. Zeros if the lower layer is on another pipeline rank."""

    def add(self, position: int, unit: int, gradient: Tensor) -> None:
        """Add the gradient of one of the position's units, [shard]. Call this for positions from the top down, and for
        the units of each position in order."""
        layout = self._groups.layout
        if (above := layout.position_above(position)) is not None:
            key = (position, unit)
            other = self._receive(above, gradient) if self._is_elsewhere(above) else self._above.pop(key)
            products = [dot(gradient, gradient), dot(other, other), dot(gradient, other)]
            self.products[self._rows[position]] += torch.stack(products)
        if (below := layout.position_below(position)) is None:
            return
        if self._is_elsewhere(below):
            self._send(below, gradient)
        else:
            self._above[below, unit] = gradient

    def wait_for_sends(self) -> None:
        with _waiting(self._groups, "what it sent"):
            for work, _ in self._sent:
                work.wait()
        self._sent.clear()

    def _is_elsewhere(self, position: int) -> bool:
        return self._groups.layout.rank_of(position) != self._groups.pipeline_rank

    # Messages have no tags: a rank receives from a peer in the order of the sends. This order is right, because every
    # rank finishes its layers from the top down, and neighbours are equally far apart in all blocks.

    def _send(self, position: int, gradient: Tensor) -> None:
        peer = self._groups.world_rank(self._groups.layout.rank_of(position))
        # Asynchronous: the peer may reach its layer much later.
        work = dist.isend(gradient, peer, group=self._groups.probe)
        assert work is not None, "this rank is part of the group"
        self._sent.append((work, gradient))

    def _receive(self, position: int, like: Tensor) -> Tensor:
        """Receive the gradient of a layer on another pipeline rank, [shard]."""
        other = torch.empty_like(like)
        with _waiting(self._groups, f"the gradient of layer {position}"):
            dist.recv(other, self._groups.world_rank(self._groups.layout.rank_of(position)), group=self._groups.probe)
        return other


def _waiting(groups: ProcessGroups, what: str) -> AbstractContextManager[object]:
    return groups.ranks.heartbeat.waiting(f"measures {what}")


def _cosine(left: float, right: float, product: float) -> float:
    """Return the cosine of two vectors. `left`, `right`: their squared norms; `product`: their dot product."""
    if not all(map(isfinite, (left, right, product))):
        return nan
    return product / sqrt(left * right) if left > 0 and right > 0 else 0.0

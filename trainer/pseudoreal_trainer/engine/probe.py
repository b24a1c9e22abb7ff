"""Measures, in one training step, the gradients that layers have of their own while they share blocks.

A layered backward pass has each of them in hand as it ends. What is kept is numbers: squares of each tensor's gradient,
for the blocks as they are and as the next phase has them, and how far neighbouring layers agree (Yang et al.,
"Speeding up deep learning training by sharing weights and then unsharing", arXiv 2110.03848: the adaptive rule).
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from math import isfinite, nan, sqrt

import torch
import torch.distributed as dist
from torch import Tensor

from pseudoreal_trainer.engine.gradients import Growing
from pseudoreal_trainer.engine.modules import Modules
from pseudoreal_trainer.engine.ranks.grid import Grid
from pseudoreal_trainer.plan.parts import parts_of
from pseudoreal_trainer.plan.units import Unit


@dataclass(frozen=True)
class LayerGradients:
    """Of one step, from gradients that are summed over all ranks and not clipped."""

    shared: dict[str, float]
    """Tensor of a shared block -> sum of the squares of its gradient."""
    single: dict[str, float]
    """The same for the gradients that the blocks of the next phase would have, in the mean over those blocks."""
    correlations: tuple[float, ...]
    """Cosines between the gradients of neighbouring layers of a block, the lowest layers first. NaN where a gradient is
    not finite."""

    @property
    def are_finite(self) -> bool:
        return all(map(isfinite, (*self.shared.values(), *self.single.values(), *self.correlations)))


@dataclass(frozen=True)
class Sum:
    """Gradients of some layers that are added up: those of a block, now or in the next phase."""

    unit: int
    """Block that the layers share now, as a unit."""
    positions: tuple[int, ...]
    """Of the layers."""
    is_shared: bool
    """Of all layers of the block."""


def sums_of(layer_blocks: Sequence[int], next_blocks: Sequence[int]) -> tuple[Sum, ...]:
    """Entry l of each: the block of layer l, now and in the next phase. Pure. Blocks of a single layer have none."""
    return (
        *(Sum(1 + block, positions, True) for block, positions in _positions(layer_blocks) if len(positions) > 1),
        *(
            Sum(1 + layer_blocks[positions[0] - 1], positions, False)
            for _, positions in _positions(next_blocks)
            if layer_blocks.count(layer_blocks[positions[0] - 1]) > 1
        ),
    )


def _positions(blocks: Sequence[int]) -> list[tuple[int, tuple[int, ...]]]:
    """Block -> positions of its layers."""
    found: dict[int, list[int]] = {}
    for position, block in enumerate(blocks, start=1):
        found.setdefault(block, []).append(position)
    return [(block, tuple(positions)) for block, positions in sorted(found.items())]


@dataclass
class _Growth:
    """Of a sum, on this rank: its part of the sum's elements."""

    left: int
    """Layers that are still to come."""
    part: Tensor | None = None
    """[shard]"""


@dataclass
class Probe:
    """One measured step of one rank. All ranks make the same calls in the order of their plans."""

    grid: Grid
    units: Sequence[Unit]
    modules: Modules
    dtype: torch.dtype
    """Of gradients."""
    sums: tuple[Sum, ...]
    """Empty: only neighbours are compared."""
    _growing: dict[int, Growing] = field(default_factory=dict)
    _growth: dict[Sum, _Growth] = field(default_factory=dict)
    _squares: dict[Sum, Tensor] = field(default_factory=dict)
    """[tensors of the unit], float64; this rank's part."""
    _above: dict[int, Tensor] = field(default_factory=dict)
    """Unit -> part of the reduced gradient of its newest position, [shard]."""
    _products: dict[int, Tensor] = field(default_factory=dict)
    """Position -> [its square, the square of the next above, their product]; this rank's part."""
    _sent: list[tuple[dist.Work, Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        mine = self.grid.layout.positions(self.grid.pipeline_rank)
        counts = {total: len(set(total.positions) & set(mine)) for total in self.sums}
        self._growth = {total: _Growth(count) for total, count in counts.items() if count}

    def accumulate(self, position: int, gradients: Sequence[Tensor]) -> None:
        """`gradients`: of the parameters of the position's unit, of one micro-batch."""
        if not self.grid.layout.shares(position):
            return
        if position not in self._growing:
            unit = self.grid.layout.unit_of(position)
            flat = torch.empty(self._shard(unit) * self.grid.layout.data, dtype=self.dtype, device=self.grid.device)
            self._growing[position] = Growing(flat, self.modules.of(unit).views(flat))
        self._growing[position].add(gradients)

    def finish(self, position: int) -> None:
        """All micro-batches of the position are through."""
        part = self._reduced(position)
        for total in self._growth:
            if position in total.positions:
                self._add(total, part)
        self._compare(position, part)

    def result(self) -> LayerGradients:
        """After the step; every rank calls it and has the same."""
        with self._wait("all that was sent"):
            for work, _ in self._sent:
                work.wait()
        self._end_sums_of_several_ranks()
        pairs = [p for p in range(1, self.grid.layout.head) if self.grid.layout.position_above(p) is not None]
        mine = [self._or_zeros(self._squares.get(total), len(self._names(total))) for total in self.sums]
        mine += [self._or_zeros(self._products.get(position), 3) for position in pairs]
        summed = self.grid.ranks.sum_(torch.cat(mine)).split([len(values) for values in mine])
        values: list[list[float]] = [part.tolist() for part in summed]
        squares = dict(zip(self.sums, values, strict=False))
        return LayerGradients(
            shared=self._by_name(squares, is_shared=True),
            single=self._by_name(squares, is_shared=False),
            correlations=tuple(_cosine(*products) for products in values[len(self.sums) :]),
        )

    def _wait(self, what: str) -> AbstractContextManager[object]:
        return self.grid.ranks.heartbeat.waiting(f"measures {what}")

    def _shard(self, unit: int) -> int:
        return self.units[unit].shard_length(self.grid.layout.data)

    def _reduced(self, position: int) -> Tensor:
        """This data rank's part of the position's gradient, summed over the data ranks."""
        flat = self._growing.pop(position).flat
        if self.grid.data is None:
            return flat
        part = torch.empty(len(flat) // self.grid.layout.data, dtype=flat.dtype, device=flat.device)
        with self._wait(f"the sum of layer {position}"):
            dist.reduce_scatter_tensor(part, flat, group=self.grid.data)
        return part

    def _add(self, total: Sum, part: Tensor) -> None:
        growth = self._growth[total]
        # Not in place: the part may belong to other sums as well.
        growth.part = part if growth.part is None else growth.part + part
        growth.left -= 1
        if growth.left == 0 and len(self._ranks(total)) == 1:
            self._squares[total] = self._squares_of(total.unit, growth.part)
            growth.part = None

    def _ranks(self, total: Sum) -> set[int]:
        """Pipeline ranks that have a part in it."""
        return {self.grid.layout.rank_of(position) for position in total.positions}

    def _compare(self, position: int, part: Tensor) -> None:
        layout, unit = self.grid.layout, self.grid.layout.unit_of(position)
        if (above := layout.position_above(position)) is not None:
            other = self._received(above, part) if self._is_elsewhere(above) else self._above[unit]
            self._products[position] = torch.stack([_dot(part, part), _dot(other, other), _dot(part, other)])
        below = layout.position_below(position)
        if below is not None and self._is_elsewhere(below):
            self._send(below, part)
        self._above[unit] = part

    def _is_elsewhere(self, position: int) -> bool:
        return self.grid.layout.rank_of(position) != self.grid.pipeline_rank

    def _send(self, position: int, part: Tensor) -> None:
        peer = self.grid.world_rank(self.grid.layout.rank_of(position))
        work = dist.isend(part, peer, group=self.grid.measuring)
        assert work is not None, "this rank is part of the group"
        self._sent.append((work, part))

    def _received(self, position: int, like: Tensor) -> Tensor:
        other = torch.empty_like(like)
        with self._wait(f"the gradient of layer {position}"):
            dist.recv(other, self.grid.world_rank(self.grid.layout.rank_of(position)), group=self.grid.measuring)
        return other

    def _end_sums_of_several_ranks(self) -> None:
        here = self.grid.pipeline_rank
        for total in self.sums:
            ranks = self._ranks(total)
            if len(ranks) == 1:
                continue
            part = torch.zeros(self._shard(total.unit), dtype=self.dtype, device=self.grid.device)
            if total in self._growth and (mine := self._growth.pop(total).part) is not None:
                part += mine
            with self._wait(f"the sum of unit {total.unit}"):
                dist.all_reduce(part, group=self.grid.measuring)
            if here == min(ranks):
                self._squares[total] = self._squares_of(total.unit, part)

    def _squares_of(self, unit: int, part: Tensor) -> Tensor:
        """[tensors], of the elements that this data rank has."""
        shard = self.units[unit].shard(self.grid.data_rank, self.grid.layout.data)
        found = {p.name: p for p in parts_of(self.units[unit], shard)}
        zero = torch.zeros((), dtype=torch.float64, device=part.device)
        squares = []
        for parameter in self.units[unit].parameters:
            if (here := found.get(parameter.name)) is None:
                squares.append(zero)
            else:
                begin = here.offset - shard.start
                own = part[begin : begin + here.end - here.begin]
                squares.append(_dot(own, own))
        return torch.stack(squares)

    def _or_zeros(self, mine: Tensor | None, length: int) -> Tensor:
        return torch.zeros(length, dtype=torch.float64, device=self.grid.device) if mine is None else mine

    def _names(self, total: Sum) -> list[str]:
        return [parameter.name for parameter in self.units[total.unit].parameters]

    def _by_name(self, squares: dict[Sum, list[float]], *, is_shared: bool) -> dict[str, float]:
        """Tensor -> mean over the sums of its block."""
        found: dict[str, list[float]] = {}
        for total, values in squares.items():
            if total.is_shared == is_shared:
                for name, value in zip(self._names(total), values, strict=True):
                    found.setdefault(name, []).append(value)
        return {name: sum(values) / len(values) for name, values in found.items()}


def _dot(left: Tensor, right: Tensor) -> Tensor:
    """Scalar, float64."""
    return torch.dot(left, right).double()


def _cosine(left: float, right: float, product: float) -> float:
    if not all(map(isfinite, (left, right, product))):
        return nan
    return product / sqrt(left * right) if left > 0 and right > 0 else 0.0

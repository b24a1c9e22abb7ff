"""Units as one rank holds them, and the parts of tensors inside a range of a unit's flat vector. Pure."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod

from pseudoreal_trainer.plan.layout import Layout
from pseudoreal_trainer.plan.units import Unit


def units_of_rank(layout: Layout, units: Iterable[Unit], world_rank: int) -> tuple[Unit, ...]:
    """Return the units as a rank holds them. `units`: units of the model, whole and with all experts."""
    mesh = layout.mesh
    own = own_units(units, mesh.expert_coordinate(world_rank), layout.expert_ranks, layout.expert_groups)
    return sliced_units(own, mesh.tensor_coordinate(world_rank), layout.tensor_ranks)


def own_units(units: Iterable[Unit], coordinate: int, ranks: int, groups: int) -> tuple[Unit, ...]:
    """Return the units as an expert rank holds them: a unit of experts is reduced to the rank's own experts and cut
    into groups. `units`: units of the model, with all experts. `coordinate`: index of the rank among the expert
    ranks."""
    own = (unit.of_rank(coordinate, ranks) for unit in units)
    return tuple(group for unit in own for group in unit.in_groups(groups))


def sliced_units(units: Iterable[Unit], coordinate: int, ranks: int) -> tuple[Unit, ...]:
    """Return the units as a tensor rank holds them: a block has the rank's slices of matrices. `coordinate`: index of
    the rank among the tensor ranks."""
    return tuple(unit.sliced(coordinate, ranks) for unit in units)


@dataclass(frozen=True)
class Part:
    """A part of a tensor: consecutive elements of the flattened tensor, or of its flattened slices of columns, one
    slice after the other."""

    name: str
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    begin: int
    """Index of the part's first element in the flattened tensor."""
    end: int
    offset: int
    """Index of the part's first element in the unit's flat vector."""
    column_slices: int = 1
    """Number of slices of columns; 1: the tensor is flattened as a whole."""

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape in which the part is stored: the shape of the tensor if the part is the whole tensor, else
        [elements]."""
        flat = (self.end - self.begin,)
        return self.shape if self.begin == 0 and self.end == prod(self.shape) else flat


def parts_of(unit: Unit, elements: range) -> list[Part]:
    """Return the parts of the unit's tensors inside a range of its flat vector."""
    found, start = [], 0
    for parameter in unit.parameters:
        begin, end = max(elements.start, start), min(elements.stop, start + parameter.numel)
        if begin < end:
            first = parameter.begin - start
            found.append(
                Part(parameter.name, parameter.whole, first + begin, first + end, begin, parameter.column_slices)
            )
        start += parameter.numel
    return found


def by_expert(begin: int, end: int, size: int) -> Iterator[tuple[int, range]]:
    """Yield (number of the expert, range of its elements) for the elements begin..end-1 of a flattened tensor. Each
    expert has `size` elements; a tensor that is not stacked has one expert, 0."""
    while begin < end:
        number = begin // size
        stop = min(end, (number + 1) * size)
        yield number, range(begin, stop)
        begin = stop

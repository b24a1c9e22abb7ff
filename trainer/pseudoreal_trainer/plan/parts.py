"""What a rank has of the units, and which parts of its tensors a range of a unit's flat vector holds. Pure."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod

from pseudoreal_trainer.plan.layout import Layout
from pseudoreal_trainer.plan.units import Unit


def units_of_rank(layout: Layout, units: Iterable[Unit], world_rank: int) -> tuple[Unit, ...]:
    """The units as a rank has them; `units`: whole."""
    return own_units(units, layout.mesh.expert_coordinate(world_rank), layout.expert_ranks, layout.expert_groups)


def own_units(units: Iterable[Unit], coordinate: int, ranks: int, groups: int) -> tuple[Unit, ...]:
    """The units of the rank with this coordinate among those over which experts are spread: with its own experts alone,
    and these in groups. `units`: whole."""
    own = (unit.of_rank(coordinate, ranks) for unit in units)
    return tuple(group for unit in own for group in unit.in_groups(groups))


@dataclass(frozen=True)
class Part:
    """A part of a tensor: consecutive elements of the flattened tensor."""

    name: str
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    begin: int
    """First element of the part, counted in the flattened tensor."""
    end: int
    offset: int
    """Index of the part's first element in the unit's flat vector."""

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape in which the part is stored: the tensor's own when the part is all of it, else flat."""
        flat = (self.end - self.begin,)
        return self.shape if self.begin == 0 and self.end == prod(self.shape) else flat


def parts_of(unit: Unit, span: range) -> list[Part]:
    """The parts of the unit's tensors that lie in a range of its flat vector."""
    found, start = [], 0
    for parameter in unit.parameters:
        begin, end = max(span.start, start), min(span.stop, start + parameter.numel)
        if begin < end:
            first = parameter.begin - start
            found.append(Part(parameter.name, parameter.whole, first + begin, first + end, begin))
        start += parameter.numel
    return found


def by_expert(begin: int, end: int, size: int) -> Iterator[tuple[int, range]]:
    """The elements begin..end-1 of a flattened tensor, in which each expert has `size`: of expert after expert its
    number and those of its elements that are among them. A tensor that is not stacked has one such number, 0."""
    while begin < end:
        number = begin // size
        stop = min(end, (number + 1) * size)
        yield number, range(begin, stop)
        begin = stop

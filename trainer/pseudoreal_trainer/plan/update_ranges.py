"""Ranges of a unit's flat vector whose elements are updated alike. Pure.

AdamW updates all elements, with two exceptions: a balancing bias, which comes last; and, with `optimizer.algorithm:
Muon`, the matrices of attention, feed-forward parts and experts, which come first and are updated by Muon. With
`optimizer.idleExperts: Skip`, a step does not update the elements of experts that no token chose.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from pseudoreal_api.spec.optimizer import Multiplier, Optimizer, TensorGroup

from pseudoreal_trainer.plan.units import EMBEDDING, EXCLUDED, HEAD, Parameter, Unit


@dataclass(frozen=True)
class UpdateRange:
    """The elements begin..end-1 of a vector, and how they are updated."""

    begin: int
    end: int
    rate: float = 1.0
    """Factor of the learning rate."""
    decay: float = 0.0
    """Coefficient of weight decay."""
    decays: bool = False
    """Whether weight decay acts on the elements, even with a decay of 0. Ranges with and without weight decay are never
    merged: the tail of a range may be rounded differently, so the ranges must not depend on the value of the decay."""
    is_balancing: bool = False
    """Whether the elements are a balancing bias: their gradient is the change to be added to them, and they have no
    moments."""
    columns: int = 0
    """Number of columns of the matrix if the elements are one whole matrix, row by row, that Muon updates; else 0."""

    @property
    def is_of_muon(self) -> bool:
        return self.columns > 0

    @property
    def rows(self) -> int:
        return (self.end - self.begin) // self.columns

    @property
    def elements(self) -> slice:
        return slice(self.begin, self.end)


def update_ranges(unit: Unit, spec: Optimizer) -> tuple[UpdateRange, ...]:
    """Return the ranges of a whole unit, one after the other. Elements that are updated alike are one range, so that
    few kernels update a unit."""
    multipliers = {multiplier.tensors: multiplier for multiplier in spec.multipliers}
    has_decay = unit.name not in {EXCLUDED[name] for name in spec.decay_exclusions}
    found: list[UpdateRange] = []
    begin = 0
    for parameter in unit.parameters:
        end = begin + parameter.numel
        if parameter.is_balancing:
            found.append(UpdateRange(begin, end, is_balancing=True))
            continue
        group = group_of(parameter)
        multiplier = multipliers.get(group) or Multiplier(tensors=group)
        decays = has_decay and parameter.is_matrix
        decay = float(spec.weight_decay) * float(multiplier.weight_decay) if decays else 0.0
        _append(found, UpdateRange(begin, end, float(multiplier.learning_rate), decay, decays))
        begin = end
    if spec.algorithm == "Muon":
        return (*_whole_matrices(unit, found), *_after(found, unit.hidden))
    return tuple(found)


def _whole_matrices(unit: Unit, ranges: Sequence[UpdateRange]) -> Iterator[UpdateRange]:
    """Yield a range for each matrix that Muon updates, with learning rate and decay as in `ranges`."""
    for matrix in unit.hidden_matrices:
        around = next(one for one in ranges if matrix.begin < one.end)
        yield replace(around, begin=matrix.begin, end=matrix.end, columns=matrix.columns)


def _after(ranges: Sequence[UpdateRange], begin: int) -> tuple[UpdateRange, ...]:
    """Return the ranges without the elements before `begin`."""
    return tuple(replace(one, begin=max(begin, one.begin)) for one in ranges if one.end > begin)


def _append(ranges: list[UpdateRange], last: UpdateRange) -> None:
    """Append a range, or extend the previous one if both are updated alike."""
    if ranges and replace(ranges[-1], end=last.end) == replace(last, begin=ranges[-1].begin):
        ranges[-1] = replace(ranges[-1], end=last.end)
    else:
        ranges.append(last)


def cut(ranges: Sequence[UpdateRange], begin: int, end: int) -> tuple[UpdateRange, ...]:
    """Return the ranges inside the elements begin..end-1, relative to `begin`.

    Padding after the last range belongs to this range, if AdamW updates the range: gradient and weights of padding are
    zero. Padding after a balancing bias belongs to no range, and a rank may have only such padding.
    """
    if not ranges:
        return ()
    last = ranges[-1].end if ranges[-1].is_balancing else end
    ends = [*(one.end for one in ranges[:-1]), last]
    parts = [
        replace(one, begin=max(one.begin, begin) - begin, end=min(stop, end) - begin)
        for one, stop in zip(ranges, ends, strict=True)
    ]
    return tuple(part for part in parts if part.begin < part.end)


def elements_of(unit: Unit, experts: Collection[int], end: int) -> tuple[range, ...]:
    """Return the ranges of the unit's flat vector that belong to these experts, in order. `end`: length of the vector
    with its padding, which belongs to the last expert."""
    found = []
    begin = 0
    for parameter in unit.parameters:
        assert parameter.experts is not None, "all tensors of a unit of experts are stacked"
        size = parameter.numel // len(parameter.experts)
        for expert in parameter.experts:
            if expert in experts:
                found.append(range(begin, end if begin + size == unit.numel else begin + size))
            begin += size
    return tuple(found)


def without(ranges: Sequence[UpdateRange], gaps: Sequence[range], begin: int = 0) -> tuple[UpdateRange, ...]:
    """Return the ranges without the elements in `gaps`, which are in order and do not overlap. `begin`: index of the
    ranges' element 0 in the vector that `gaps` refers to."""
    return tuple(part for one in ranges for part in _parts_between(one, gaps, begin))


def _parts_between(one: UpdateRange, gaps: Sequence[range], begin: int) -> Iterator[UpdateRange]:
    start = one.begin
    for gap in gaps:
        if start < (stop := min(gap.start - begin, one.end)):
            yield replace(one, begin=start, end=stop)
        start = max(start, gap.stop - begin)
    if start < one.end:
        yield replace(one, begin=start)


_OF_BLOCKS: dict[str, TensorGroup] = {
    "attention": "Attention",
    "ffn": "FeedForward",
    "experts": "Experts",
    "shared": "Experts",
    "router": "Router",
}
"""Part of a block -> the group of its matrices."""


def group_of(parameter: Parameter) -> TensorGroup:
    """Return the group of a tensor in `optimizer.multipliers`. Each tensor that AdamW updates is in one group."""
    if parameter.is_bias:
        return "Biases"
    if not parameter.is_matrix:
        return "Norms"
    ends: dict[str, TensorGroup] = {EMBEDDING: "Embedding", HEAD: "Head"}
    first, *rest = parameter.name.split(".")
    return ends.get(first) or _OF_BLOCKS[rest[1]]

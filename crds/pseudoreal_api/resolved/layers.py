"""Assignment of layers to blocks and to sets of experts. Pure."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, repeat
from operator import eq
from typing import Any

from pseudoreal_api.spec.model import Model
from pseudoreal_api.spec.phase import Growth, GrowthPattern, Schedule, Sharing

MODULAR: tuple[Schedule, ...] = ("Layered", "Interleaved")
"""Schedules that assign layers to pipeline ranks round-robin. In the other schedules each rank has neighbouring
layers."""


def blocks_of_layers(sharing: Sharing, layers: int) -> tuple[int, ...]:
    """Return the block of each layer. Raises ValueError if `sharing.blocks` does not divide the layers."""
    groups = groups_of_layers(sharing, layers)
    return tuple(range(layers)) if sharing.shares_experts_alone else groups


def number_of_blocks(sharing: Sharing, layers: int) -> int:
    """Return the number of blocks in `blocks_of_layers`, without listing them. Raises ValueError under the same
    condition."""
    _check_divides(sharing, layers)
    return layers if sharing.shares_experts_alone else sharing.blocks


def experts_of_layers(sharing: Sharing, model: Model) -> tuple[int | None, ...]:
    """Return the set of experts of each layer, None for a layer without experts; empty for a model without experts.

    A set of experts has the number of a block with these experts: the only such block if layers share whole blocks, the
    first one if layers share experts alone.
    """
    if model.experts is None:
        return ()
    blocks, groups = blocks_of_layers(sharing, model.layers), groups_of_layers(sharing, model.layers)
    dense = set(model.experts.dense_layers)
    firsts = {groups[layer]: blocks[layer] for layer in reversed(range(model.layers)) if layer not in dense}
    return tuple(None if layer in dense else firsts[group] for layer, group in enumerate(groups))


def has_cross_stage_weights(model: Model, sharing: Sharing, pipeline: int, schedule: Schedule) -> bool:
    """Return whether layers that share a block or experts are on several pipeline ranks."""
    is_modular = schedule in MODULAR
    stages = [layer % pipeline if is_modular else layer * pipeline // model.layers for layer in range(model.layers)]
    for owners in (blocks_of_layers(sharing, model.layers), experts_of_layers(sharing, model) or stages):
        users = {(owner, stage) for owner, stage in zip(owners, stages, strict=True) if owner is not None}
        if len(users) > len({owner for owner, _ in users}):
            return True
    return False


def sets_of(layer_experts: Sequence[int | None]) -> list[int]:
    """Return the numbers of all sets of experts in use, ascending."""
    return sorted({number for number in layer_experts if number is not None})


def first_layers(model: Model, layers: int, experts: int | None = None) -> Model:
    """Return a model with only the first layers of `model`, and with so many experts; None: as many. Settings of layers
    that it does not have are left out."""
    of_model, window = model.experts, model.attention.window
    count = of_model.count if of_model and experts is None else experts
    if layers == model.layers and (of_model is None or of_model.count == count):
        return model
    if of_model is not None:
        dense = [layer for layer in of_model.dense_layers if layer < layers]
        of_model = of_model.model_copy(update={"dense_layers": dense, "count": count})
    if window is not None and window.layers is not None:
        windowed = [layer for layer in window.layers if layer < layers]
        window = window.model_copy(update={"layers": windowed}) if windowed else None
    attention = model.attention.model_copy(update={"window": window})
    return model.model_copy(update={"layers": layers, "attention": attention, "experts": of_model})


def source_layers(pattern: GrowthPattern, before: int, after: int) -> tuple[int, ...]:
    """Return, for each of `after` layers, the layer that it begins as, of `before` layers. Equal depths: each layer
    begins as itself."""
    if pattern == "Stack":
        return (tuple(range(before)) * -(-after // before))[:after]
    return tuple(layer * before // after for layer in range(after))


@dataclass(frozen=True)
class Sources:
    """What the blocks and the sets of experts of a phase begin as."""

    blocks: dict[int, int]
    """Number of each block -> number of its source, a block of the phase before."""
    experts: dict[int, int]
    """The same mapping for sets of experts; empty without experts."""
    zero_blocks: frozenset[int] = frozenset()
    """Blocks of added layers, whose outputs begin as zero."""
    zero_experts: frozenset[int] = frozenset()
    """The same for sets of experts."""

    @classmethod
    def of(cls, growth: Growth | None, before: tuple[Model, Sharing], after: tuple[Model, Sharing]) -> "Sources":
        """Return the sources for model and sharing `after`, where layers begin as layers of model and sharing
        `before`. `growth`: None for the same number of layers.

        Raises ValueError if layers that share a block, or a set of experts, would begin as different ones, or if only
        some of them would begin with outputs of zero.
        """
        growth = growth or Growth()
        origins = source_layers(growth.pattern, before[0].layers, after[0].layers)
        (had_blocks, had_experts), (blocks, experts) = (
            (blocks_of_layers(sharing, model.layers), experts_of_layers(sharing, model))
            for model, sharing in (before, after)
        )
        found = cls(
            _sources([had_blocks[origin] for origin in origins], blocks, origins, "block"),
            _sources([had_experts[one] for one in origins] if had_experts else [], experts, origins, "set of experts"),
        )
        if growth.initial == "Copy":
            return found
        firsts = {origin: layer for layer, origin in reversed([*enumerate(origins)])}
        added = [firsts[origin] != layer for layer, origin in enumerate(origins)]
        zero_blocks, zero_experts = _owned_by(added, blocks, "block"), _owned_by(added, experts, "set of experts")
        return replace(found, zero_blocks=zero_blocks, zero_experts=zero_experts)


def _owned_by(added: Sequence[bool], numbers: Sequence[int | None], what: str) -> frozenset[int]:
    """Return the blocks, or the sets of experts, of added layers. Entry l of `numbers` is the number that layer l
    uses. Raises ValueError if another layer uses one of them as well."""
    users = dict[int, int]()
    for layer, number in enumerate(numbers):
        first = layer if number is None else users.setdefault(number, layer)
        if added[layer] != added[first]:
            zero, other = (layer, first) if added[layer] else (first, layer)
            raise ValueError(
                f"initial ZeroOutput sets outputs of layer {zero} to zero, but layer {zero} shares {what} {number} with"
                f" layer {other}, which is not added"
            )
    return frozenset(number for number, layer in users.items() if added[layer])


def _sources(
    before: Sequence[int | None], after: Sequence[int | None], origins: Sequence[int], what: str
) -> dict[int, int]:
    """Return new number -> old number. Entry l of `after` is the number that layer l uses, entry l of `before` the
    number used by the layer that it begins as, `origins[l]`. None: that layer uses nothing of the kind."""
    whole: Any = dict(zip(after, before, strict=True))
    if None not in after and None not in before and all(map(eq, map(whole.__getitem__, after), before)):
        return dict(whole)  # so far in C: the operator checks up to 16 phases in a reconcile pass
    found: dict[int, int] = {}
    for layer, (old, new) in enumerate(zip(before, after, strict=True)):
        if old is None and new is None:
            continue
        if old is None or new is None:
            here, there = (f"{'without' if number is None else 'with'} experts" for number in (new, old))
            raise ValueError(
                f"layer {layer} {here} would start from layer {origins[layer]} {there}, but both layers must have"
                " experts, or neither"
            )
        if found.setdefault(new, old) != old:
            raise ValueError(
                f"the sharing must refine the sharing of the phase before, but layer {layer} would start from {what}"
                f" {old} of that phase, and another layer that shares {what} {new} would start from {what} {found[new]}"
            )
    return found


@dataclass(frozen=True)
class ExpertSets(Collection[int]):
    """The set numbers that `experts_of_layers` returns, without a list of all layers.

    The operator computes the set numbers for each phase in each reconcile pass.
    """

    groups: int
    step: int = 1
    """Distance between set numbers: group g has the set number g * step if its first layer has experts."""
    absent: frozenset[int] = frozenset()
    """Numbers g * step that are not set numbers: group g has no experts, or its set number is in `moved`."""
    moved: frozenset[int] = frozenset()
    """Set numbers other than g * step. Only if layers share experts alone: the first layer with experts of a group,
    unless it is the group's first layer."""

    def __len__(self) -> int:
        return self.groups - len(self.absent) + len(self.moved)

    def __contains__(self, number: object) -> bool:
        if not isinstance(number, int) or number in self.moved:
            return number in self.moved
        return number % self.step == 0 and 0 <= number // self.step < self.groups and number not in self.absent

    def __iter__(self) -> Iterator[int]:
        present = (number for number in range(0, self.groups * self.step, self.step) if number not in self.absent)
        return iter(sorted([*present, *self.moved]))


def sets_of_experts(sharing: Sharing, model: Model) -> ExpertSets:
    """Return the set numbers in `experts_of_layers`. Raises ValueError if `sharing.blocks` does not divide the
    layers."""
    _check_divides(sharing, model.layers)
    if model.experts is None:
        return ExpertSets(0)
    dense, by_layer = set(model.experts.dense_layers), sharing.shares_experts_alone
    step = model.layers // sharing.blocks if by_layer and sharing.pattern == "Segment" else 1
    absent, moved = set(), set()
    for group in {_group(sharing, model.layers, layer) for layer in dense}:
        absent.add(group * step)
        first = next((layer for layer in _layers_of(sharing, model.layers, group) if layer not in dense), None)
        if first is not None:
            moved.add(first if by_layer else group)
    return ExpertSets(sharing.blocks, step, frozenset(absent - moved), frozenset(moved - absent))


def groups_of_layers(sharing: Sharing, layers: int) -> tuple[int, ...]:
    """Return the group of each layer l: l mod groups (Cycle) or l // (layers / groups) (Segment)."""
    _check_divides(sharing, layers)
    if sharing.pattern == "Cycle":
        return tuple(range(sharing.blocks)) * (layers // sharing.blocks)
    size = layers // sharing.blocks
    return tuple(chain.from_iterable(repeat(block, size) for block in range(sharing.blocks)))


def _check_divides(sharing: Sharing, layers: int) -> None:
    if layers % sharing.blocks:
        raise ValueError(f"sharing.blocks {sharing.blocks} must divide model.layers {layers}; change one of them")


def _group(sharing: Sharing, layers: int, layer: int) -> int:
    return layer % sharing.blocks if sharing.pattern == "Cycle" else layer // (layers // sharing.blocks)


def _layers_of(sharing: Sharing, layers: int, group: int) -> range:
    """Return the layers of a group, ascending."""
    size = layers // sharing.blocks
    return (
        range(group, layers, sharing.blocks) if sharing.pattern == "Cycle" else range(group * size, (group + 1) * size)
    )

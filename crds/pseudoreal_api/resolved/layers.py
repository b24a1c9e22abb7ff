"""Assignment of layers to blocks and to sets of experts. Pure."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from pseudoreal_api.spec.model import Model
from pseudoreal_api.spec.phase import GrowthPattern, Sharing


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
    firsts: dict[int, int] = {}
    for layer in filter(model.has_experts, range(model.layers)):
        firsts.setdefault(groups[layer], blocks[layer])
    return tuple(firsts[group] if model.has_experts(layer) else None for layer, group in enumerate(groups))


def sets_of(layer_experts: Sequence[int | None]) -> list[int]:
    """Return the numbers of all sets of experts in use, ascending."""
    return sorted({number for number in layer_experts if number is not None})


def source_layers(pattern: GrowthPattern, before: int, after: int) -> tuple[int, ...]:
    """Return, for each of `after` layers, the layer that it begins as, of `before` layers. Equal depths: each layer
    begins as itself."""
    return tuple(layer % before if pattern == "Stack" else layer * before // after for layer in range(after))


@dataclass(frozen=True)
class Sources:
    """What the blocks and the sets of experts of a phase begin as."""

    blocks: dict[int, int]
    """Number of each block -> number of its source, a block of the phase before."""
    experts: dict[int, int]
    """The same mapping for sets of experts; empty without experts."""

    @classmethod
    def of(
        cls, pattern: GrowthPattern | None, before: tuple[Model, Sharing], after: tuple[Model, Sharing]
    ) -> "Sources":
        """Return the sources for model and sharing `after`, where layers begin as layers of model and sharing
        `before`. `pattern`: None for the same number of layers.

        Raises ValueError if layers that share a block, or a set of experts, would begin as different ones.
        """
        origins = source_layers(pattern or "Stack", before[0].layers, after[0].layers)
        (had_blocks, had_experts), (blocks, experts) = (
            (blocks_of_layers(sharing, model.layers), experts_of_layers(sharing, model))
            for model, sharing in (before, after)
        )
        return cls(
            _sources([had_blocks[origin] for origin in origins], blocks, origins, "block"),
            _sources(
                [had_experts[origin] for origin in origins] if had_experts else [], experts, origins, "set of experts"
            ),
        )


def _sources(
    before: Sequence[int | None], after: Sequence[int | None], origins: Sequence[int], what: str
) -> dict[int, int]:
    """Return new number -> old number. Entry l of `after` is the number that layer l uses, entry l of `before` the
    number used by the layer that it begins as, `origins[l]`. None: that layer uses nothing of the kind."""
    found: dict[int, int] = {}
    for layer, (old, new) in enumerate(zip(before, after, strict=True)):
        if old is None and new is None:
            continue
        if old is None or new is None:
            here, there = (f"{'without' if number is None else 'with'} experts" for number in (new, old))
            raise ValueError(
                f"layer {layer}, one {here}, would begin as layer {origins[layer]}, one {there}; the two kinds have no"
                " weights in common"
            )
        if found.setdefault(new, old) != old:
            raise ValueError(
                f"layer {layer} shares new {what} {new} with a layer of old {what} {found[new]}, but begins with old"
                f" {what} {old}; a phase's sharing must refine that of the phase before"
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
    return tuple(_group(sharing, layers, layer) for layer in range(layers))


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

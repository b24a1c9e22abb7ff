"""Which block and which experts each layer uses. Pure."""

from collections.abc import Sequence

from pseudoreal_api.spec.model import Model
from pseudoreal_api.spec.phase import Sharing


def blocks_of_layers(sharing: Sharing, layers: int) -> tuple[int, ...]:
    """Entry l is the block of layer l. Raises ValueError where `sharing.blocks` does not divide the layers."""
    groups = groups_of_layers(sharing, layers)
    return tuple(range(layers)) if sharing.shares_experts_alone else groups


def experts_of_layers(sharing: Sharing, model: Model) -> tuple[int | None, ...]:
    """Entry l is the number of the experts of layer l; None: it has none. Empty: no layer has.

    Experts have the number of a block that uses them: where layers share blocks, of the only one; where they share
    experts alone, of the first.
    """
    if model.experts is None:
        return ()
    blocks, groups = blocks_of_layers(sharing, model.layers), groups_of_layers(sharing, model.layers)
    firsts: dict[int, int] = {}
    for layer in filter(model.has_experts, range(model.layers)):
        firsts.setdefault(groups[layer], blocks[layer])
    return tuple(firsts[group] if model.has_experts(layer) else None for layer, group in enumerate(groups))


def sets_of(layer_experts: Sequence[int | None]) -> list[int]:
    """The numbers of all experts that layers use, ascending."""
    return sorted({number for number in layer_experts if number is not None})


def groups_of_layers(sharing: Sharing, layers: int) -> tuple[int, ...]:
    """Entry l is the group of layer l: l mod groups (Cycle) or l // (layers / groups) (Segment)."""
    if layers % sharing.blocks:
        raise ValueError(f"sharing.blocks {sharing.blocks} must divide model.layers {layers}; change one of them")
    if sharing.pattern == "Cycle":
        return tuple(layer % sharing.blocks for layer in range(layers))
    return tuple(layer // (layers // sharing.blocks) for layer in range(layers))

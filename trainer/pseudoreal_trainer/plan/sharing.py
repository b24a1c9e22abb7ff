"""Which block and which experts each layer uses. Pure."""

from collections.abc import Sequence

from pseudoreal_api.spec.model import Model
from pseudoreal_api.spec.phase import Sharing


def blocks_of_layers(sharing: Sharing, layers: int) -> tuple[int, ...]:
    """Entry l is the block of layer l: l mod blocks (Cycle) or l // (layers / blocks) (Segment)."""
    if layers % sharing.blocks:
        raise ValueError(f"sharing.blocks {sharing.blocks} must divide model.layers {layers}; change one of them")
    if sharing.pattern == "Cycle":
        return tuple(layer % sharing.blocks for layer in range(layers))
    return tuple(layer // (layers // sharing.blocks) for layer in range(layers))


def experts_of_layers(sharing: Sharing, model: Model) -> tuple[int | None, ...]:
    """Entry l is the number of the experts of layer l; None: it has none. Empty: no layer has."""
    if model.experts is None:
        return ()
    numbers = blocks_of_layers(sharing, model.layers)
    return tuple(number if model.has_experts(layer) else None for layer, number in enumerate(numbers))


def sets_of(layer_experts: Sequence[int | None]) -> list[int]:
    """The numbers of all experts that layers use, ascending."""
    return sorted({number for number in layer_experts if number is not None})


def sources(before: tuple[int, ...], after: tuple[int, ...]) -> tuple[int, ...]:
    """Entry b is the old block that the layers of the new block b used.

    Raises ValueError when those layers used several old blocks: then the new sharing does not refine the old one.
    """
    found: dict[int, int] = {}
    for layer, (old, new) in enumerate(zip(before, after, strict=True)):
        if found.setdefault(new, old) != old:
            raise ValueError(
                f"layer {layer} shares new block {new} with a layer of old block {found[new]}, but used old block"
                f" {old}; a phase's sharing must refine that of the phase before"
            )
    return tuple(found[block] for block in range(len(found)))

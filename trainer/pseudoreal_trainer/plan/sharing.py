"""Which block each layer uses. Pure."""

from pseudoreal_api.spec.phase import Sharing


def blocks_of_layers(sharing: Sharing, layers: int) -> tuple[int, ...]:
    """Entry l is the block of layer l: l mod blocks (Cycle) or l // (layers / blocks) (Segment)."""
    if layers % sharing.blocks:
        raise ValueError(f"sharing.blocks {sharing.blocks} must divide model.layers {layers}; change one of them")
    if sharing.pattern == "Cycle":
        return tuple(layer % sharing.blocks for layer in range(layers))
    return tuple(layer // (layers // sharing.blocks) for layer in range(layers))


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

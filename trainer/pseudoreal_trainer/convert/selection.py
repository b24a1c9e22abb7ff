"""Selection of the layers of existing weights that become the initial weights of shared blocks. Pure.

Bae et al. 2024 (arXiv 2410.20672, section 3) compare the first layers, layers at equal distances, and the mean of the
layers that share a block. No choice preserves the model's function; further training restores it.
"""

from collections.abc import Iterator

from pseudoreal_api.resolved.layers import groups_of_layers, source_layers
from pseudoreal_api.spec.checkpoint import BlockOrigins
from pseudoreal_api.spec.model import Model
from pseudoreal_api.spec.phase import Sharing

from pseudoreal_trainer.errors import UnfitWeights

Layers = tuple[int, ...]


def adds_layers(origins: BlockOrigins) -> bool:
    """Return whether the rule is for weights with fewer layers than the phase."""
    return origins.type in ("Stack", "Interleave")


def origins_of_layers(origins: BlockOrigins, published: Model, model: Model) -> Layers:
    """Return the published layer that each layer with a block of its own begins as."""
    return source_layers("Interleave" if origins.type == "Interleave" else "Stack", published.layers, model.layers)


def layers_of_blocks(origins: BlockOrigins, published: Model, model: Model, sharing: Sharing) -> tuple[Layers, ...]:
    """Return the origins of each block, or of each set of experts if layers share only experts: the layers of
    `published` that are averaged into its initial weights. Raises UnfitWeights if a block would start from a layer of
    another kind, dense or with experts, than the layers that use it."""
    used_by = groups_of_layers(sharing, model.layers)
    found = tuple(_chosen(origins, published, model, sharing, used_by))
    if sharing.shares_experts_alone:
        return _with_experts(found, origins, published, model, used_by)
    for block, layers in enumerate(found):
        user = used_by.index(block)
        for layer in layers:
            if published.has_experts(layer) != model.has_experts(user):
                raise UnfitWeights(
                    f"block {block} would begin as layer {layer}, {_kind(published, layer)}, and layer {user}, which"
                    f" uses it, is {_kind(model, user)}; {_remedy(origins)}"
                )
    return found


def _remedy(origins: BlockOrigins) -> str:
    if adds_layers(origins):
        return "change spec.checkpoint.startFrom.blocks.type or spec.model.experts.denseLayers"
    return (
        "set spec.checkpoint.startFrom.blocks.type to Listed, and list in blocks.layers only layers of the same kind"
        " (dense, or with experts) as the layers of the job that start from them"
    )


def _with_experts(
    found: tuple[Layers, ...], origins: BlockOrigins, published: Model, model: Model, used_by: Layers
) -> tuple[Layers, ...]:
    """Return, for each set of experts, the layers with experts among its origins. Averages leave dense origins
    out. Raises UnfitWeights if a used set has a dense origin in any other case, or if a layer would start from a layer
    of another kind. An unused set may get no layers."""
    for layer, source in enumerate(origins_of_layers(origins, published, model)):
        if published.has_experts(source) != model.has_experts(layer):
            raise UnfitWeights(
                f"layer {layer}, {_kind(model, layer)}, would begin as layer {source}, {_kind(published, source)};"
                f" {_remedy(origins)}"
            )
    for number, layers in enumerate(found):
        is_used = any(model.has_experts(layer) for layer, used in enumerate(used_by) if used == number)
        dense = [layer for layer in layers if not published.has_experts(layer)]
        if is_used and dense and origins.type != "Average":
            raise UnfitWeights(
                f"set {number} of the shared experts would start as the experts of layer {dense[0]}, but this layer is"
                f" dense, so it has no experts; {_remedy(origins)}"
            )
    return tuple(tuple(filter(published.has_experts, layers)) for layers in found)


def _chosen(
    origins: BlockOrigins, published: Model, model: Model, sharing: Sharing, used_by: Layers
) -> Iterator[Layers]:
    blocks, layers = range(sharing.blocks), model.layers
    if sharing.blocks == layers or adds_layers(origins):
        # Each layer has a block of its own, and starts from itself; or a block starts as its first layer does.
        of_layers = origins_of_layers(origins, published, model)
        yield from ((of_layers[used_by.index(block)],) for block in blocks)
        return
    match origins.type:
        case "Evenly":
            yield from ((_evenly(block, sharing.blocks, layers),) for block in blocks)
        case "Lower":
            yield from ((block,) for block in blocks)
        case "Listed":
            yield from ((layer,) for layer in origins.layers)
        case "Average":
            yield from (tuple(layer for layer in range(layers) if used_by[layer] == block) for block in blocks)


def _evenly(block: int, blocks: int, layers: int) -> int:
    """Return the layer at block / (blocks - 1) of the way from the first to the last, rounded half up; the first layer
    if there is one block."""
    return (2 * block * (layers - 1) + (blocks - 1)) // (2 * (blocks - 1)) if blocks > 1 else 0


def _kind(model: Model, layer: int) -> str:
    return "one with experts" if model.has_experts(layer) else "a dense one"

import pytest
from pseudoreal_api.resolved.layers import blocks_of_layers, experts_of_layers
from pseudoreal_api.spec.model import Model
from pseudoreal_api.spec.phase import Sharing
from pseudoreal_trainer.checkpoint.delink import block_sources
from pseudoreal_trainer.model.reference import Transformer
from pseudoreal_trainer.plan.units import units_of


def test_cycle_and_segment_follow_their_definitions() -> None:
    for layers in (1, 6, 12):
        for blocks in (b for b in range(1, layers + 1) if layers % b == 0):
            cycle = blocks_of_layers(Sharing(blocks=blocks, pattern="Cycle"), layers)
            segment = blocks_of_layers(Sharing(blocks=blocks, pattern="Segment"), layers)
            assert all(cycle[layer] == cycle[layer + blocks] for layer in range(layers - blocks))
            assert cycle[:blocks] == tuple(range(blocks))
            assert segment == tuple(sorted(cycle))


def test_blocks_must_divide_layers() -> None:
    with pytest.raises(ValueError, match=r"sharing.blocks 5 must divide model.layers 12"):
        blocks_of_layers(Sharing(blocks=5), 12)


@pytest.mark.parametrize("pattern", ["Cycle", "Segment"])
def test_every_layer_keeps_its_weights_when_blocks_are_refined(pattern: str) -> None:
    for few, many in ((1, 3), (2, 4), (3, 6), (2, 12), (4, 4)):
        before = blocks_of_layers(Sharing.model_validate({"blocks": few, "pattern": pattern}), 12)
        after = blocks_of_layers(Sharing.model_validate({"blocks": many, "pattern": pattern}), 12)
        found = block_sources(before, after)
        assert len(found) == many
        assert [found[block] for block in after] == list(before)


def test_a_sharing_that_does_not_refine_is_refused() -> None:
    with pytest.raises(ValueError, match="must refine"):
        block_sources((0, 1, 0, 1), (0, 0, 1, 1))


def _mixture(dense: tuple[int, ...]) -> Model:
    """Six layers; the layers in `dense` have no experts."""
    sizes = {"layers": 6, "hiddenSize": 8, "attention": {"heads": 2}, "sequenceLength": 4, "feedForward": {"size": 12}}
    return Model.model_validate(sizes | {"experts": {"count": 4, "denseLayers": list(dense)}})


def _numbers(blocks: int, pattern: str, part: str, dense: tuple[int, ...] = ()) -> tuple[list[int], list[int | None]]:
    spec = _mixture(dense)
    sharing = Sharing.model_validate({"blocks": blocks, "pattern": pattern, "parts": [part]})
    return [*blocks_of_layers(sharing, 6)], [*experts_of_layers(sharing, spec)]


def test_layers_that_share_experts_alone_have_blocks_of_their_own() -> None:
    """A set of experts has the number of the first layer that uses it."""
    assert _numbers(2, "Cycle", "Experts") == ([0, 1, 2, 3, 4, 5], [0, 1, 0, 1, 0, 1])
    assert _numbers(2, "Segment", "Experts") == ([0, 1, 2, 3, 4, 5], [0, 0, 0, 3, 3, 3])
    assert _numbers(2, "Segment", "Experts", dense=(0, 4)) == ([0, 1, 2, 3, 4, 5], [None, 1, 1, 3, None, 3])
    assert _numbers(6, "Cycle", "Experts") == ([0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5])


def test_layers_that_share_blocks_share_their_experts() -> None:
    assert _numbers(2, "Segment", "Blocks") == ([0, 0, 0, 1, 1, 1], [0, 0, 0, 1, 1, 1])
    assert _numbers(3, "Cycle", "Blocks", dense=(1, 4)) == ([0, 1, 2, 0, 1, 2], [0, None, 2, 0, None, 2])


@pytest.mark.parametrize("dense", [(), (0, 4)])
def test_units_of_layers_that_share_experts_have_the_parameters_of_the_model(dense: tuple[int, ...]) -> None:
    spec = _mixture(dense)
    sharing = Sharing(blocks=2, pattern="Segment", parts=["Experts"])
    ours = {p.name: p.shape for unit in units_of(spec, sharing) for p in unit.parameters}
    theirs = {name: tuple(p.shape) for name, p in Transformer(spec, sharing).named_parameters()}
    assert ours == theirs

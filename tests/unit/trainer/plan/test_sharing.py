import pytest
from pseudoreal_api.spec.phase import Sharing
from pseudoreal_trainer.plan.sharing import blocks_of_layers, sources


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
        found = sources(before, after)
        assert len(found) == many
        assert [found[block] for block in after] == list(before)


def test_a_sharing_that_does_not_refine_is_refused() -> None:
    with pytest.raises(ValueError, match="must refine"):
        sources((0, 1, 0, 1), (0, 0, 1, 1))

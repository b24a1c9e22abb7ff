from itertools import product
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pseudoreal_api.resolved.layers import Sources, blocks_of_layers, experts_of_layers, source_layers
from pseudoreal_api.spec.model import Model
from pseudoreal_api.spec.phase import Growth, GrowthPattern, Sharing
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
        before, after = (Sharing.model_validate({"blocks": blocks, "pattern": pattern}) for blocks in (few, many))
        model = _mixture((), 12)
        found = Sources.of(None, (model, before), (model, after)).blocks
        assert len(found) == many
        assert [found[block] for block in blocks_of_layers(after, 12)] == list(blocks_of_layers(before, 12))


def test_a_sharing_that_does_not_refine_is_refused() -> None:
    model, halves = _mixture((), 4), {"blocks": 2}
    cycle, segment = (Sharing.model_validate(halves | {"pattern": pattern}) for pattern in ("Cycle", "Segment"))
    with pytest.raises(ValueError, match="must refine"):
        Sources.of(None, (model, cycle), (model, segment))


def test_layers_begin_as_layers_of_the_phase_before() -> None:
    assert source_layers("Stack", 3, 8) == (0, 1, 2, 0, 1, 2, 0, 1)
    assert source_layers("Interleave", 3, 8) == (0, 0, 0, 1, 1, 1, 2, 2)
    for pattern, layers in product(get_args(GrowthPattern), (1, 5, 12)):
        assert source_layers(pattern, layers, layers) == tuple(range(layers))
        assert source_layers(pattern, 1, layers) == (0,) * layers


def _sharings(layers: int) -> st.SearchStrategy[Sharing]:
    divisors = [number for number in range(1, layers + 1) if layers % number == 0]
    of_part = st.sampled_from([["Blocks"], ["Experts"]])
    return st.builds(
        Sharing, blocks=st.sampled_from(divisors), pattern=st.sampled_from(["Cycle", "Segment"]), parts=of_part
    )


@given(st.data(), st.integers(1, 6), st.integers(0, 10), st.sampled_from(get_args(GrowthPattern)))
def test_every_layer_begins_with_the_weights_of_its_source(
    data: st.DataObject, few: int, more: int, pattern: GrowthPattern
) -> None:
    """By labels: each block and each set of experts of the phase before carries its own, each layer of the next phase
    must find that of its source, and the sources exist where no two layers of a block find different ones."""
    many = few + more
    layers = {few: data.draw(st.sets(st.integers(0, few - 1))), many: data.draw(st.sets(st.integers(0, many - 1)))}
    dense = [layers[few], layers[many]] if data.draw(st.booleans()) else [set(), set()]
    small, large = (_mixture(tuple(sorted(which)), count) for which, count in zip(dense, (few, many), strict=True))
    before, after = data.draw(_sharings(few)), data.draw(_sharings(many))
    origin = [layer % few if pattern == "Stack" else int(layer * few / many + 1e-9) for layer in range(many)]
    found: dict[str, dict[int, set[str]]] = {"blocks": {}, "experts": {}}
    for layer in range(many):
        for kind, had, gets in (
            ("blocks", blocks_of_layers(before, few), blocks_of_layers(after, many)),
            ("experts", experts_of_layers(before, small), experts_of_layers(after, large)),
        ):
            number, label = gets[layer], had[origin[layer]]
            if number is not None or label is not None:
                found[kind].setdefault(-1 if number is None else number, set()).add(str(label))
    fits = all(
        len(labels) == 1 and labels != {"None"} and number >= 0
        for sources in found.values()
        for number, labels in sources.items()
    )
    if not fits:
        with pytest.raises(ValueError, match=r"must refine|both layers must have experts"):
            Sources.of(Growth(pattern=pattern), (small, before), (large, after))
        return
    sources = Sources.of(Growth(pattern=pattern), (small, before), (large, after))
    assert {number: {str(old)} for number, old in sources.blocks.items()} == found["blocks"]
    assert {number: {str(old)} for number, old in sources.experts.items()} == found["experts"]


def _mixture(dense: tuple[int, ...], layers: int = 6) -> Model:
    """The layers in `dense` have no experts."""
    sizes = {"hiddenSize": 8, "attention": {"heads": 2}, "sequenceLength": 4, "feedForward": {"size": 12}}
    return Model.model_validate(sizes | {"layers": layers, "experts": {"count": 4, "denseLayers": list(dense)}})


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

"""Blocks and sets of experts, counted by formula and named layer by layer."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pseudoreal_api.resolved.layers import (
    blocks_of_layers,
    experts_of_layers,
    number_of_blocks,
    sets_of,
    sets_of_experts,
)
from pseudoreal_api.spec.check import check_job
from pseudoreal_api.spec.model import MixtureOfExperts
from pseudoreal_api.spec.phase import Sharing

from tests.support.jobs import good_job

MODEL = check_job(good_job()).spec.model


@given(
    groups=st.integers(1, 6),
    size=st.integers(1, 6),
    pattern=st.sampled_from(["Cycle", "Segment"]),
    part=st.sampled_from(["Blocks", "Experts"]),
    dense=st.none() | st.lists(st.integers(0, 35), max_size=20),
)
def test_counts_of_blocks_and_expert_sets_equal_those_used_by_layers(
    groups: int, size: int, pattern: Any, part: Any, dense: Any
) -> None:
    sharing, layers = Sharing(blocks=groups, pattern=pattern, parts=[part]), groups * size
    experts = None
    if dense is not None:
        experts = MixtureOfExperts(count=2, dense_layers=[layer for layer in dense if layer < layers])
    model = MODEL.model_copy(update={"layers": layers, "experts": experts})
    assert number_of_blocks(sharing, layers) == len(set(blocks_of_layers(sharing, layers)))
    assert model.layers_with_experts == sum(map(model.has_experts, range(layers)))
    sets, named = sets_of_experts(sharing, model), sets_of(experts_of_layers(sharing, model))
    assert [*sets] == named == [number for number in range(-1, 2 * layers) if number in sets]
    assert len(sets) == len(named)


def test_blocks_that_do_not_divide_are_refused() -> None:
    for count in (number_of_blocks, blocks_of_layers):
        with pytest.raises(ValueError, match=r"sharing.blocks 3 must divide model.layers 8"):
            count(Sharing(blocks=3), 8)
    with pytest.raises(ValueError, match=r"sharing.blocks 3 must divide"):
        sets_of_experts(Sharing(blocks=3), MODEL)

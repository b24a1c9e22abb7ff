"""Layers with shared weights on several pipeline ranks: as the contract sees them, and as the layout has them."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from pseudoreal_api.resolved.layers import blocks_of_layers, experts_of_layers, has_cross_stage_weights
from pseudoreal_api.spec.model import Attention, FeedForward, MixtureOfExperts, Model
from pseudoreal_api.spec.phase import Sharing
from pseudoreal_trainer.plan.layout import Layout


@given(
    blocks=st.integers(1, 4),
    uses=st.integers(1, 4),
    pattern=st.sampled_from(["Cycle", "Segment"]),
    part=st.sampled_from(["Blocks", "Experts"]),
    has_experts=st.booleans(),
    pipeline=st.integers(1, 4),
    order=st.sampled_from(["Layered", "GPipe", "1F1B", "Interleaved"]),
)
def test_weights_are_cross_stage_where_the_layout_has_cross_stage_units(
    blocks: int, uses: int, pattern: Any, part: Any, has_experts: bool, pipeline: int, order: Any
) -> None:
    layers, part = blocks * uses, part if has_experts else "Blocks"
    if pipeline > layers:
        return
    model = Model(
        layers=layers,
        hidden_size=8,
        attention=Attention(heads=2),
        sequence_length=4,
        feed_forward=FeedForward(size=8),
        experts=MixtureOfExperts(count=2) if has_experts else None,
    )
    sharing = Sharing(blocks=blocks, pattern=pattern, parts=[part])
    layout = Layout(
        layer_blocks=blocks_of_layers(sharing, layers),
        layer_experts=experts_of_layers(sharing, model),
        pipeline=pipeline,
        data=1,
        micro_batches=1,
        order=order,
    )
    assert has_cross_stage_weights(model, sharing, pipeline, order) == (layout.common_layer_units > 0)

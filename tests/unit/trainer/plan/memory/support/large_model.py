"""A model of 6.5 billion parameters, for sizes counted by hand."""

from typing import Any

from pseudoreal_api.spec.model import Attention, FeedForward, Model
from pseudoreal_api.spec.phase import Home, Sharing
from pseudoreal_trainer.plan.layout import Layout
from pseudoreal_trainer.plan.sizes import Sizes
from pseudoreal_trainer.plan.units import units_of

LAYERS = 32
MODEL = Model(
    layers=LAYERS,
    hidden_size=4096,
    attention=Attention(heads=32),
    sequence_length=2048,
    feed_forward=FeedForward(size=11008, activation="SwiGLU"),
)
SIZES = Sizes(
    MODEL, units_of(MODEL, Sharing(blocks=LAYERS)), compute_bytes=2, master_bytes=4, micro_batch=4, device="accelerator"
)
PARAMETERS = sum(unit.numel for unit in SIZES.units)
TOKENS = 8 * 4 * 4 * (2048 + 1)
"""Bytes of the token ids of four micro-batches of four sequences."""


def layout(home: Home, **options: Any) -> Layout:
    return Layout(tuple(range(LAYERS)), 1, 1, 4, homes=(home,) * (LAYERS + 2), **options)

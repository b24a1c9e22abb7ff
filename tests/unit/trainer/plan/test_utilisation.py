"""Operations of a step against torch's FLOP counter."""

from typing import Literal

import pytest
import torch
from pseudoreal_api.spec.model import Attention, FeedForward, Model, Window
from pseudoreal_api.spec.phase import Sharing
from pseudoreal_trainer.model.reference import build_model
from pseudoreal_trainer.plan.sizes import Sizes
from pseudoreal_trainer.plan.units import units_of
from pseudoreal_trainer.plan.utilisation import peak_operations, step_operations
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

WINDOW = Window(size=7, layers=[1])


@pytest.mark.parametrize("activation", ["GELU", "SwiGLU"])
@pytest.mark.parametrize("embeddings", ["Separate", "Tied"])
@pytest.mark.parametrize("window", [None, WINDOW])
@pytest.mark.parametrize("heads", [Attention(heads=2), Attention(heads=4, key_value_heads=2, head_size=12)])
def test_step_operations_equal_torchs_count_without_masked_pairs(
    heads: Attention, window: Window | None, embeddings: Literal["Separate", "Tied"], activation: str
) -> None:
    """A matrix shared by embedding and head counts once."""
    model = Model(
        layers=3,
        hidden_size=32,
        attention=heads.model_copy(update={"window": window}),
        sequence_length=24,
        feed_forward=FeedForward.model_validate({"size": 80, "activation": activation}),
        vocabulary_size=300,
        embeddings=embeddings,
    )
    sharing, sequences = Sharing(blocks=1), 2
    tokens = torch.randint(0, 256, (sequences, model.sequence_length + 1))
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        logits = build_model(model, sharing, 0, torch.float32)(tokens[:, :-1])
        F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    sizes = Sizes(model, units_of(model, sharing), 4, 4, micro_batch=sequences)
    trained = sequences * model.sequence_length
    # torch counts all token pairs: the products of queries with keys and of weights with values, in the forward pass
    # and twice in the backward pass.
    length, of_pair = model.sequence_length, 3 * 2 * 2 * model.query_size
    not_counted = model.layers * trained * length // 2
    if window is not None:
        # Pairs before the window; they form a triangle of half a square.
        not_counted += sequences * (length - window.size) ** 2 // 2
    assert counter.get_total_flops() == pytest.approx(step_operations(sizes, trained) + of_pair * not_counted, rel=1e-4)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H20", 148e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA GeForce RTX 5090", None),
    ],
)
def test_peak_operations_are_known_by_device_name(name: str, peak: float | None) -> None:
    assert peak_operations(name) == peak

"""Experts on a GPU: how often they wait for the GPU, and torch's grouped product against a loop."""

import warnings
from collections.abc import Callable

import pytest
import torch
from pseudoreal_api.spec.model import Attention, FeedForward, MixtureOfExperts, Model
from pseudoreal_api.spec.phase import Sharing
from pseudoreal_trainer.model import grouped
from pseudoreal_trainer.model.block import Block
from pseudoreal_trainer.model.grouped import can_group
from pseudoreal_trainer.model.modules import UnitModule
from pseudoreal_trainer.plan.units import units_of
from torch import Tensor

from tests.gpu.conftest import Figure

pytestmark = pytest.mark.gpu

SPEC = Model(
    layers=1,
    hidden_size=256,
    attention=Attention(heads=4),
    sequence_length=64,
    feed_forward=FeedForward(size=512, activation="SwiGLU"),
    experts=MixtureOfExperts(count=64, prototypes=4),
)


@pytest.fixture
def block(gpu: torch.device) -> Block:
    """Return a block in bfloat16 whose parameters are views of one vector, as in the engine."""
    with torch.device("meta"):
        made = Block(SPEC)
    torch.manual_seed(3)
    for unit in units_of(SPEC, Sharing(blocks=1))[1:-1]:
        UnitModule(made, unit).bind(torch.randn(unit.numel, device=gpu, dtype=torch.bfloat16).mul_(0.05))
    return made


def _features(gpu: torch.device, sequences: int) -> Tensor:
    torch.manual_seed(4)
    return torch.randn(
        sequences, SPEC.sequence_length, SPEC.hidden_size, device=gpu, dtype=torch.bfloat16, requires_grad=True
    )


def test_an_expert_layer_waits_once_for_the_host(block: Block, gpu: torch.device, figure: Figure) -> None:
    hidden = _features(gpu, 4)
    block.experts(hidden, block.router(hidden)).sum().backward()  # load the kernels
    found: list[Tensor] = []
    forward = _waits(lambda: found.append(block.experts(hidden, block.router(hidden))))
    backward = _waits(lambda: found[0].sum().backward())
    figure(f"{forward} waits in the forward pass, {backward} in the backward pass, of {SPEC.experts}")
    assert forward <= 1
    assert backward == 0


def test_grouped_products_equal_a_loop_over_experts(
    block: Block, gpu: torch.device, monkeypatch: pytest.MonkeyPatch, figure: Figure
) -> None:
    hidden = _features(gpu, 1)
    assert can_group(hidden.flatten(0, 1), block.experts.up.weight), "the case can use the grouped kernel under test"
    parameters = [p for n, p in block.named_parameters() if n.startswith(("router.", "experts."))]
    found = []
    for is_grouped in (True, False):
        monkeypatch.setattr(grouped, "can_group", lambda *_, is_grouped=is_grouped: is_grouped)
        out = block.experts(hidden, block.router(hidden))
        found.append([out, *torch.autograd.grad(out.float().square().sum(), [hidden, *parameters])])
    idle = sum(not of_one.any() for gradient in found[1][3:] for of_one in gradient)
    worst = max(_difference(one, other) for one, other in zip(*found, strict=True))
    figure(f"differ by {worst:.1e} of their size at most; {idle} matrices of experts without tokens are zero")
    assert idle >= 3, "some experts had no tokens"
    assert worst < 3e-2


def _difference(one: Tensor, other: Tensor) -> float:
    size = other.float().abs().max().item()
    return (one.float() - other.float()).abs().max().item() / (size or 1.0)


def _waits(act: Callable[[], object]) -> int:
    """Return how often the host waits for the GPU, as reported by torch's sync debug mode."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            act()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing CUDA operation" in str(one.message) for one in caught)

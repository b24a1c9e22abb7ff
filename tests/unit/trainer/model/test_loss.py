"""The chunked loss against closed forms defined here, and bitwise against unchunked logits."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from pseudoreal_api.spec.model import Model
from pseudoreal_trainer.model.head import Head
from pseudoreal_trainer.model.loss import IGNORED, Loss
from torch import Tensor
from torch.nn import functional as F

ROWS, LENGTH, HIDDEN, VOCABULARY, DIVISOR = 3, 9, 8, 311, 17
TOKENS = ROWS * LENGTH
EPSILON = 1e-6
CHUNKS = [None, 1, 5, 9, 13, 26, TOKENS, 100]
"""Chunk lengths in tokens; 5, 13 and 26 leave a shorter last chunk."""


@dataclass
class Found:
    """Losses and gradients of a backward pass."""

    cross_entropy: float
    z: float | None
    of_hidden: Tensor
    of_norm: Tensor
    of_head: Tensor


@dataclass
class Setting:
    """A head, hidden states and targets. `ignoring` excludes two single targets, and all of the fourth to sixth chunk
    of 5, the last three."""

    dtype: torch.dtype = torch.float64
    head: Head = field(init=False)
    hidden: Tensor = field(init=False)
    targets: Tensor = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(7)

        def drawn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64).to(self.dtype)

        model = {"layers": 1, "hiddenSize": HIDDEN, "attention": {"heads": 1}, "sequenceLength": LENGTH}
        spec = Model.model_validate(model | {"feedForward": {"size": 4}, "vocabularySize": VOCABULARY})
        self.head = Head(spec).to(self.dtype)
        self.head.norm.weight.data = 1 + drawn(HIDDEN) / 4
        self.head.head.weight.data = drawn(VOCABULARY, HIDDEN)
        self.hidden = drawn(ROWS, LENGTH, HIDDEN)
        self.targets = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=generator)

    def ignoring(self) -> "Setting":
        self.targets.view(-1)[[0, 7, *range(15, 30 - 3)]] = IGNORED
        return self


def backward(loss: Loss, setting: Setting) -> Found:
    taken: dict[Any, Tensor] = {}

    def take(parameter: Tensor, gradient: Tensor) -> None:
        taken[parameter] = taken[parameter] + gradient if parameter in taken else gradient

    losses, of_hidden = loss.backward(setting.head, setting.hidden, setting.targets, DIVISOR, take)
    z = None if losses.z is None else float(losses.z)
    matrices = taken[setting.head.norm.weight], taken[setting.head.matrix]
    return Found(float(losses.cross_entropy), z, of_hidden, *matrices)


def closed_form(setting: Setting, cap: float | None, factor: float) -> Found:
    """Return losses and gradients by formula, in float64, without autograd.

    With logits z and their log-sum-exp l, the sum over the counted tokens is of l - z_y + factor l^2. Its derivative by
    z is softmax(z) (1 + 2 factor l), less 1 at y.
    """
    x, weight = setting.hidden.flatten(0, 1), setting.head.norm.weight.detach()  # [N, H], [H]
    matrix, targets = setting.head.matrix.detach(), setting.targets.flatten()
    counted = (targets != IGNORED).double()
    labels = targets.clamp(min=0)
    root = (x.square().mean(1, keepdim=True) + EPSILON) ** -0.5
    features = x * root * weight
    linear = features @ matrix.T
    z = linear if cap is None else cap * (linear / cap).tanh()
    exponentials = (z - z.max()).exp()
    log_sum = exponentials.sum(1).log() + z.max()
    of_z = exponentials / exponentials.sum(1, keepdim=True) * (1 + 2 * factor * log_sum)[:, None]
    of_z[torch.arange(len(z)), labels] -= 1
    of_z = of_z * counted[:, None] / DIVISOR
    of_linear = of_z if cap is None else of_z * (1 - (z / cap) ** 2)
    of_features = of_linear @ matrix
    scaled = of_features * weight
    of_x = root * scaled - x * root**3 * (scaled * x).mean(1, keepdim=True)
    entropy = counted * (log_sum - z[torch.arange(len(z)), labels])
    z_loss = factor * float((counted * log_sum**2).sum()) if factor else None
    return Found(
        float(entropy.sum()),
        z_loss,
        of_x.view_as(setting.hidden),
        (of_features * x * root).sum(0),
        of_linear.T @ features,
    )


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("factor", [0.0, 1e-3])
@pytest.mark.parametrize("cap", [None, 3.0])
def test_loss_is_the_closed_form_for_any_chunk_length(cap: float | None, factor: float, chunk: int | None) -> None:
    setting = Setting().ignoring()
    found = backward(Loss(torch.float64, chunk, cap, factor), setting)
    expected = closed_form(setting, cap, factor)
    assert found.cross_entropy == pytest.approx(expected.cross_entropy, rel=1e-13)
    assert (found.z is None) == (factor == 0)
    if factor:
        assert found.z == pytest.approx(expected.z, rel=1e-13)
    for mine, theirs in [
        (found.of_hidden, expected.of_hidden),
        (found.of_norm, expected.of_norm),
        (found.of_head, expected.of_head),
    ]:
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-13)
    assert found.of_hidden.view(TOKENS, HIDDEN)[0].abs().max() == 0, "the first target is ignored"


@pytest.mark.processor
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_chunk_is_a_plain_backward_pass_to_the_bit(dtype: torch.dtype) -> None:
    setting = Setting(dtype)
    found = backward(Loss(torch.float32), setting)
    head, hidden = setting.head, setting.hidden.clone().requires_grad_()
    logits = head.head(head.norm(hidden)).flatten(0, 1).float()
    loss = F.cross_entropy(logits, setting.targets.flatten(), reduction="sum")
    of_hidden, of_norm, of_head = torch.autograd.grad(loss / DIVISOR, [hidden, head.norm.weight, head.head.weight])
    assert found.cross_entropy == float(loss.detach())
    assert torch.equal(found.of_hidden, of_hidden)
    assert torch.equal(found.of_norm, of_norm)
    assert torch.equal(found.of_head, of_head)


@pytest.mark.parametrize("chunk", [None, 5])
@pytest.mark.parametrize("factor", [0.0, 1e-3])
def test_an_evaluation_has_the_cross_entropy_of_a_backward_pass(factor: float, chunk: int | None) -> None:
    setting, loss = Setting(torch.float32).ignoring(), Loss(torch.float32, chunk, 3.0, factor)
    alone = loss.cross_entropy(setting.head, setting.hidden, setting.targets)
    assert float(alone) == backward(loss, setting).cross_entropy


def test_a_sum_in_bfloat16_is_one_in_float32() -> None:
    """With 9 chunks, a bfloat16 sum (8 significant bits) would be off by a percent."""
    setting = Setting(torch.bfloat16)
    exact = Setting(torch.float64)
    exact.head.load_state_dict(setting.head.state_dict())
    exact.hidden = setting.hidden.double()
    whole = closed_form(exact, None, 0.0).cross_entropy
    found = [backward(Loss(torch.float32, chunk), setting).cross_entropy for chunk in (None, 3, 1)]
    assert found == pytest.approx([whole] * 3, rel=2e-3)
    assert found == pytest.approx([found[0]] * 3, rel=1e-6)


@pytest.mark.parametrize("factor", [0.0, 1e-3])
def test_no_tokens_make_a_gradient_of_zeros(factor: float) -> None:
    """A data rank's part of a micro-batch may be empty; the rank still takes part in the sum over ranks."""
    setting = Setting()
    setting.hidden, setting.targets = setting.hidden[:0], setting.targets[:0]
    found = backward(Loss(torch.float64, 5, None, factor), setting)
    assert (found.cross_entropy, found.z) == (0.0, 0.0 if factor else None)
    assert found.of_hidden.shape == (0, LENGTH, HIDDEN)
    assert not found.of_norm.any()
    assert not found.of_head.any()


@pytest.mark.processor
def test_loss_leaves_its_hidden_states_unchanged() -> None:
    """The normed features are overwritten by their gradient; the hidden states stay intact."""
    setting = Setting()
    before = setting.hidden.clone()
    backward(Loss(torch.float64, 5), setting)
    assert torch.equal(setting.hidden, before)

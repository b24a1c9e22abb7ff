"""bfloat16 with float32 masters equals ordinary autograd on a copy of the masters bitwise, in every home."""

from pathlib import Path

import pytest
import torch
from pseudoreal_trainer.engine.ranks.ranks import Ranks
from pseudoreal_trainer.model.reference import build_model
from torch import Tensor
from torch.nn import functional as F

from tests.support.adamw import adamw
from tests.unit.trainer.engine.support.cases import RATE, SEED, STEPS, Case
from tests.unit.trainer.engine.support.reference import batch_of
from tests.unit.trainer.engine.support.running import run_case

pytestmark = pytest.mark.processor

CASES = [
    *(Case(precision="bfloat16", homes=homes) for homes in ("d", "h", "D")),
    Case(precision="bfloat16", homes="hD", window=1, stash=True),
    Case(precision="bfloat16", homes="D", keep="All", order="1F1B"),
    Case(precision="bfloat16", homes="D", keep="Products", order="1F1B", activation="SwiGLU"),
    Case(precision="bfloat16", homes="hD", experts=6, prototypes=2),
    Case(precision="bfloat16", homes="D", experts=4, keep="All"),
]


def _reference(case: Case) -> tuple[list[float], dict[str, Tensor]]:
    """Return the loss of each step, and the masters after the last step."""
    masters = build_model(case.model, case.sharing, SEED, torch.float32)
    optimizer = adamw(masters.parameters(), case.optimizer, RATE)
    losses = []
    for step in range(STEPS):
        losses.append(_gradients(masters, case, batch_of(case, step)))
        optimizer.step()
    return losses, {name: parameter.detach() for name, parameter in masters.named_parameters()}


def _gradients(masters: torch.nn.Module, case: Case, batch: Tensor) -> float:
    """Set the gradients of the masters, summed in float32, and return the loss."""
    copy = build_model(case.model, case.sharing, SEED, torch.bfloat16)
    copy.load_state_dict(masters.state_dict())
    tokens, sums = batch[:, :, 1:].numel(), []
    masters.zero_grad(set_to_none=False)
    for windows in batch:
        logits = copy(windows[:, :-1]).float()
        loss = F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten(), reduction="sum")
        sums.append(loss.detach())
        for master, gradient in zip(
            masters.parameters(), torch.autograd.grad(loss / tokens, list(copy.parameters())), strict=True
        ):
            grown = torch.zeros_like(master) if master.grad is None else master.grad
            master.grad = grown + gradient
    return float(torch.stack(sums).sum()) / tokens


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_bfloat16_agrees_to_the_bit(case: Case, tmp_path: Path) -> None:
    found = run_case(case, Ranks(0, 1, torch.device("cpu")), tmp_path)
    losses, weights = _reference(case)
    assert found.losses == losses
    assert found.weights.keys() == weights.keys()
    for name, expected in weights.items():
        assert torch.equal(found.weights[name], expected), name

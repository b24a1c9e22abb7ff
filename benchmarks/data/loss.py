"""Measure one turn of a loss: `python -m benchmarks.data.loss CASE RESULT`."""

import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from pseudoreal_trainer.model import head as model_head
from pseudoreal_trainer.model.loss import Loss
from pseudoreal_trainer.plan.sizes import logit_bytes, loss_chunk_limit
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.data.losses import Case, Passes
from benchmarks.data.memory import Growth
from benchmarks.data.results import OURS, WHOLE

SEED = 7
_FLOAT32_BYTES = 4


class Head(model_head.Head):
    """Final norm and head of the given sizes, without a model's spec."""

    def __init__(self, hidden: int, vocabulary: int) -> None:
        nn.Module.__init__(self)
        self.norm = nn.RMSNorm(hidden)
        self.head = nn.Linear(hidden, vocabulary, bias=False)


Pass = Callable[[Head, Tensor, Tensor], tuple[float, Tensor]]
"""Head, hidden states [1, T, H] and targets [1, T] -> the loss summed over the tokens, and the gradient of the hidden
states. The gradients of the head's parameters are left in the parameters."""


def main(case: Case, result: Path) -> None:
    result.write_text(passes(case).model_dump_json())


def passes(case: Case) -> Passes:
    torch.manual_seed(SEED)
    head = Head(case.hidden, case.vocabulary)
    hidden, targets = torch.randn(1, case.tokens, case.hidden), torch.randint(case.vocabulary, (1, case.tokens))
    growth, seconds = Growth(), list[float]()
    for _ in range(case.passes):
        head.zero_grad()
        begin = time.perf_counter()
        loss, of_hidden = PASSES[case.stack](head, hidden, targets)
        seconds.append(time.perf_counter() - begin)
    values = [loss, of_hidden.norm().item(), *(_gradient(p).norm().item() for p in head.parameters())]
    return Passes(seconds=seconds, peak_bytes=growth.peak_bytes, values=values)


def in_chunks(head: Head, hidden: Tensor, targets: Tensor) -> tuple[float, Tensor]:
    """Compute our loss, in chunks of the length used in training."""
    chunk = loss_chunk_limit(head.head.out_features, _FLOAT32_BYTES, logit_bytes("cpu", None))
    losses, of_hidden = Loss(torch.float32, chunk).backward(head, hidden, targets, 1.0, _add)
    return losses.cross_entropy.item(), of_hidden


def whole(head: Head, hidden: Tensor, targets: Tensor) -> tuple[float, Tensor]:
    hidden = hidden.detach().requires_grad_()
    logits = F.linear(head.norm(hidden), head.matrix)  # [1, T, V]
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    del logits
    loss.backward()
    return loss.item(), _gradient(hidden)


def _add(parameter: Tensor, gradient: Tensor) -> None:
    """Add to the parameter's gradient."""
    parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)


def _gradient(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad


PASSES: dict[str, Pass] = {OURS: in_chunks, WHOLE: whole}

if __name__ == "__main__":
    main(Case.model_validate_json(sys.argv[1]), Path(sys.argv[2]))

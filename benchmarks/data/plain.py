"""Train with plain torch and `transformers`: `python -m benchmarks.data.plain WORK RESULT`."""

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pseudoreal_api.spec.optimizer import Optimizer
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from benchmarks.data.training import Steps, Work


def main(work: Work, result: Path) -> None:
    seconds, losses, begin = list[float](), list[float](), time.perf_counter()
    for loss in train(work):
        now = time.perf_counter()
        seconds.append(now - begin)
        losses.append(loss)
        print(f"step {len(losses)}: {seconds[-1]:.2f}s, loss {loss:.4f}", flush=True)
        begin = time.perf_counter()
    result.write_text(Steps(seconds=seconds, losses=losses).model_dump_json())


def train(work: Work) -> Iterator[float]:
    """Yield the loss of each step in nats per token, after the step. All samples are in memory, so reading takes no
    time."""
    samples = torch.from_numpy(np.load(work.batches)).long()  # [steps, B, T + 1]
    model: Any = AutoModelForCausalLM.from_pretrained(
        work.model, dtype=torch.float32, attn_implementation="sdpa"
    ).train()
    optimizer = _adamw(model, work.optimizer)
    for tokens in samples:
        loss = _loss(model, tokens)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), float(work.optimizer.clipping.norm))
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


def _loss(model: Any, tokens: Tensor) -> Tensor:
    """Return the mean loss over the B T predictions in tokens [B, T + 1]."""
    logits = model(input_ids=tokens[:, :-1], use_cache=False).logits  # [B, T, V]
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def _adamw(model: torch.nn.Module, spec: Optimizer) -> torch.optim.AdamW:
    """Return the optimizer; matrices decay, norms do not."""
    parameters = [*model.parameters()]
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": float(spec.weight_decay)},
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
    ]
    betas = (float(spec.beta1), float(spec.beta2))
    return torch.optim.AdamW(groups, lr=float(spec.learning_rate), betas=betas, eps=float(spec.epsilon), fused=True)


if __name__ == "__main__":
    main(Work.model_validate_json(sys.argv[1]), Path(sys.argv[2]))

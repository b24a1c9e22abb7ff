"""The model as a plain module, the base of every peer."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import torch
from pseudoreal_api.spec.phase import Sharing
from pseudoreal_trainer.model.transformer import Transformer, build_model
from torch import Tensor, nn

from benchmarks.stacks.recompute import recompute_blocks
from benchmarks.work import BETAS, EPSILON, LEARNING_RATE, WEIGHT_DECAY, Work, cross_entropy


def plain_model(work: Work) -> Transformer:
    """Return the model without sharing: one block per layer."""
    model = build_model(work.model, Sharing(blocks=work.model.layers), work.seed, torch.float32)
    if work.recompute:
        recompute_blocks(model)
    return model


def train(
    model: nn.Module, work: Work, rank: int, world: int, synced: Callable[[bool], AbstractContextManager[None]]
) -> Iterator[Tensor]:
    """Yield the loss of each step.

    `synced` makes the context of a micro-batch's passes; its argument is True for the last micro-batch, in which the
    gradients of all micro-batches are reduced.
    """
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=BETAS, eps=EPSILON, weight_decay=WEIGHT_DECAY, fused=True
    )
    for batch in work.batches:
        total = torch.zeros((), device=batch.device)
        for number, tokens in enumerate(work.micro_batches_of(batch, rank, world), start=1):
            with synced(number == work.micro_batches):
                loss = cross_entropy(model(tokens[:, :-1]), tokens) / work.micro_batches
                loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        yield total

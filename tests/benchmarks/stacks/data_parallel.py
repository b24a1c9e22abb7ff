"""torch's DistributedDataParallel: weights, gradients and optimizer state whole on every rank."""

from collections.abc import Iterator
from contextlib import nullcontext

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from tests.benchmarks.stacks.plain import plain_model
from tests.benchmarks.work import BETAS, EPSILON, LEARNING_RATE, WEIGHT_DECAY, Work, cross_entropy


def train(work: Work, rank: int, world: int) -> Iterator[Tensor]:
    model = DistributedDataParallel(plain_model(work), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=BETAS, eps=EPSILON, weight_decay=WEIGHT_DECAY, fused=True
    )
    for batch in work.batches:
        total = torch.zeros((), device=batch.device)
        for number, tokens in enumerate(work.micro_batches_of(batch, rank, world), start=1):
            # The gradients of all micro-batches are reduced once, with the last.
            with nullcontext() if number == work.micro_batches else model.no_sync():
                loss = cross_entropy(model(tokens[:, :-1]), tokens) / work.micro_batches
                loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        yield total

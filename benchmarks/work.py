"""Interface of a stack: its input and its output."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from pseudoreal_api.spec.model import Model
from torch import Tensor
from torch.nn import functional as F

LEARNING_RATE = 3e-4
BETAS = (0.9, 0.95)
EPSILON = 1e-8
WEIGHT_DECAY = 0.0
# The machine has one core per rank.
THREADS_PER_RANK = 1


@dataclass(frozen=True)
class Work:
    """Work of a stack, the same on every rank: float32, AdamW with the constants above, no clipping, constant learning
    rate."""

    model: Model
    seed: int
    """Seed of the initial weights."""
    batches: Tensor
    """Bytes of all ranks, [steps, sequences, sequence + 1]; targets are the following tokens. The passes run on the
    device of this tensor."""
    micro_batches: int
    recompute: bool

    def micro_batches_of(self, batch: Tensor, rank: int, world: int) -> tuple[Tensor, ...]:
        """Return this rank's micro-batches in order: [sequences, sequence + 1] -> n times [sequences / world / n,
        sequence + 1]."""
        return batch.chunk(world)[rank].chunk(self.micro_batches)


@dataclass(frozen=True)
class Batch:
    """Micro-batches of [B, T + 1] for our engine, on the device of the passes."""

    parts: tuple[Tensor, ...]

    def shape(self, micro_batch: int) -> tuple[int, int]:
        sequences, length = self.parts[micro_batch].shape
        return sequences, length - 1

    def tokens(self, micro_batch: int) -> Tensor:
        return self.parts[micro_batch]


class Stack(Protocol):
    """One way to train on several ranks; `dist` has its gloo group when the stack is called."""

    def __call__(self, work: Work, rank: int, world: int) -> Iterator[Tensor]:
        """Yield, for each of the work's batches, the mean loss over this rank's share, before the update.

        Callers measure the time from yield to yield, so all work of a step must happen between two yields.
        """
        ...


def cross_entropy(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the mean loss over the B T predictions: logits [B, T, 256], tokens [B, T + 1]."""
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def noisy_sequences(steps: int, sequences: int, length: int, seed: int) -> Tensor:
    """Return learnable text, [steps, sequences, length]: byte t + 1 is 5 times byte t, plus 0 to 3, mod 256.

    Losses fall, so a stack with wrong updates is detected.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(256, (steps, sequences, length), generator=generator)
    noise = torch.randint(4, (steps, sequences, length), generator=generator)
    for position in range(1, length):
        tokens[..., position] = (5 * tokens[..., position - 1] + noise[..., position]) % 256
    return tokens

"""What a stack is asked to train, and what it answers."""

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
# More would fight for the cores: there is one for each rank.
THREADS_PER_RANK = 1


@dataclass(frozen=True)
class Work:
    """The same on every rank. Float32, AdamW with the constants above, no clipping, a constant learning rate."""

    model: Model
    seed: int
    """Seed of the first weights."""
    batches: Tensor
    """Bytes of all ranks: [steps, sequences, sequence + 1]; the targets are the tokens that follow. Where they are, the
    passes are made."""
    micro_batches: int
    recompute: bool

    def micro_batches_of(self, batch: Tensor, rank: int, world: int) -> tuple[Tensor, ...]:
        """[sequences, sequence + 1] -> what this rank trains on, in turn: each [sequences / world / n, sequence + 1]"""
        return batch.chunk(world)[rank].chunk(self.micro_batches)


@dataclass(frozen=True)
class Batch:
    """Micro-batches of [B, T + 1] as our engine takes them, where the passes are made."""

    parts: tuple[Tensor, ...]

    def shape(self, micro_batch: int) -> tuple[int, int]:
        sequences, length = self.parts[micro_batch].shape
        return sequences, length - 1

    def tokens(self, micro_batch: int) -> Tensor:
        return self.parts[micro_batch]


class Stack(Protocol):
    """One way to train on several ranks; `dist` has its gloo group when it is called."""

    def __call__(self, work: Work, rank: int, world: int) -> Iterator[Tensor]:
        """Yields, after each of the work's batches, the mean loss over this rank's share of it (before the update).

        A caller measures the time from yield to yield, so all that a step needs must happen between two of them.
        """
        ...


def cross_entropy(logits: Tensor, tokens: Tensor) -> Tensor:
    """logits [B, T, 256], tokens [B, T + 1] -> mean over the B T predictions"""
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def noisy_sequences(steps: int, sequences: int, length: int, seed: int) -> Tensor:
    """Text that can be learned: byte t + 1 is 5 times byte t, plus 0 to 3, mod 256. [steps, sequences, length]

    The losses fall, so that a stack whose updates are wrong shows it.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(256, (steps, sequences, length), generator=generator)
    noise = torch.randint(4, (steps, sequences, length), generator=generator)
    for position in range(1, length):
        tokens[..., position] = (5 * tokens[..., position - 1] + noise[..., position]) % 256
    return tokens

"""One training step: gradients of the rank's samples, one sum over the ranks, one update."""

from dataclasses import dataclass
from math import isfinite

import torch
from pseudoreal_api.resolved import PhaseConfig
from torch import Tensor, nn

from pseudoreal_trainer.compute import loss_sum
from pseudoreal_trainer.model import Transformer
from pseudoreal_trainer.optimizer import Optimizer
from pseudoreal_trainer.ranks import Ranks
from pseudoreal_trainer.schedule import learning_rate
from pseudoreal_trainer.stream import Stream, rank_parts


@dataclass(frozen=True)
class StepResult:
    loss: float
    """Of the whole batch, nats per token."""
    stop: bool
    """Some rank was asked to stop."""


class FlatGradients:
    """All gradients as views of one vector, which ends with the loss and the wish to stop: one sum for everything."""

    def __init__(self, model: nn.Module) -> None:
        parameters = list(model.parameters())
        self.flat = parameters[0].new_zeros(sum(p.numel() for p in parameters) + 2)
        offset = 0
        for parameter in parameters:
            parameter.grad = self.flat[offset : offset + parameter.numel()].view_as(parameter)
            offset += parameter.numel()

    @property
    def loss(self) -> Tensor:
        return self.flat[-2]

    @property
    def stop(self) -> Tensor:
        return self.flat[-1]


@dataclass(frozen=True)
class Stepper:
    config: PhaseConfig
    ranks: Ranks
    stream: Stream
    model: Transformer
    optimizer: Optimizer
    gradients: FlatGradients

    def take(self, step: int, cursor: int, stop: bool) -> StepResult:
        """Makes step `step` (the first is 1) from the samples at `cursor`.

        The loss, the gradients and the update are the same on every rank, and up to the order of sums the same for
        every number of ranks. A loss that is not finite changes no weight.
        """
        self.gradients.flat.zero_()
        self._accumulate(cursor)
        self.gradients.stop.fill_(stop)
        self.ranks.sum_(self.gradients.flat)
        loss, stops = self.gradients.flat[-2:].tolist()
        result = StepResult(loss / self._tokens, stops > 0)
        if isfinite(loss):
            self._update(step)
        return result

    @property
    def _tokens(self) -> int:
        return self.config.batch.sequences * self.config.model.sequence

    def _accumulate(self, cursor: int) -> None:
        for first, end in rank_parts(self.config.batch, cursor, self.ranks.rank, self.ranks.world):
            if first == end:
                continue
            loss = loss_sum(self.model, self.stream.windows(first, end), self.config.precision)
            torch.autograd.backward(loss / self._tokens)
            self.gradients.loss.add_(loss.detach())

    def _update(self, step: int) -> None:
        self.optimizer.update(learning_rate(self.config.optimizer, step, self.config.total_steps))

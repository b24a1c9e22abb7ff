"""One training step of a phase: the samples of this rank, the learning rate, the engine."""

from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray
from pseudoreal_api.resolved.config import PhaseConfig
from torch import Tensor

from pseudoreal_trainer.data.stream import Stream, rank_parts
from pseudoreal_trainer.engine.engine import Engine
from pseudoreal_trainer.engine.probe import LayerGradients, Probe
from pseudoreal_trainer.engine.reductions import Agreement
from pseudoreal_trainer.engine.runner import Training
from pseudoreal_trainer.forecast.memory.crossing import Shape
from pseudoreal_trainer.training.schedule import phase_rate


@dataclass(frozen=True)
class StepResult:
    loss: float
    """Of the whole batch, nats per token."""
    norm: float
    """Of the whole gradient, where clipping needs it; else 0."""
    trains: bool
    """Both are finite: only then anything is updated."""
    left_out: tuple[int, ...]
    """Units whose update is left out."""
    stop: bool
    """Some rank was asked to stop."""
    finish: bool
    """Some rank was asked to end the phase."""
    gradients: LayerGradients | None
    """Where they were measured."""


@dataclass(frozen=True)
class StreamBatch:
    """This data rank's windows of a step."""

    stream: Stream
    parts: list[tuple[int, int]]
    """Cursors [first, end) of each micro-batch."""

    def shape(self, micro_batch: int) -> Shape:
        first, end = self.parts[micro_batch]
        return end - first, self.stream.sequence

    def tokens(self, micro_batch: int) -> Tensor:
        return tokens_of(self.stream.windows(*self.parts[micro_batch]))


@dataclass(frozen=True)
class Stepper:
    config: PhaseConfig
    stream: Stream
    engine: Engine
    begin: int
    """Step at which the phase began."""

    def take(
        self, step: int, cursor: int, *, stop: bool = False, finish: bool = False, probe: Probe | None = None
    ) -> StepResult:
        """Makes step `step` (the first is 1) from the samples at `cursor`. This rank was asked to stop, or to finish.

        The loss, the gradients and the update are the same on every rank, and up to the order of sums the same in
        every layout. A loss or gradient that is not finite changes no weight: with clipping global and after such a
        loss none at all, otherwise none of the units whose gradients are not finite.
        """
        grid, batch = self.engine.grid, self.config.batch
        parts = rank_parts(batch, cursor, grid.data_rank, grid.layout.data)
        tokens = batch.sequences * self.config.model.sequence
        rate = phase_rate(self.config, step, self.begin)
        windows = StreamBatch(self.stream, parts)
        agreement: Agreement = self.engine.train(windows, Training(tokens, rate, stop, finish), step, probe)
        gradients = None if probe is None else probe.result()
        loss = agreement.loss_sum / tokens
        return StepResult(
            loss=loss,
            norm=agreement.norm,
            trains=agreement.trains,
            left_out=agreement.left_out,
            stop=agreement.stop,
            finish=agreement.finish,
            gradients=gradients,
        )


def tokens_of(windows: NDArray[Any]) -> Tensor:
    """Bytes [B, T + 1] -> token ids."""
    return torch.from_numpy(windows).to(torch.int64)

"""Phases in which some gradients are not finite, in this process or in forked ranks."""

import os
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from math import nan
from pathlib import Path
from unittest.mock import patch

import torch
from pseudoreal_api.resolved.config import PhaseConfig
from pseudoreal_trainer.data.corpus import load_corpus
from pseudoreal_trainer.engine.gradients import Gradients
from pseudoreal_trainer.engine.ranks.ranks import Ranks
from pseudoreal_trainer.training.phase import train_phase
from torch import Tensor

UNIT = 1
"""The first block's unit."""


def spoilt(steps: Callable[[int], bool] | Collection[int], value: float = nan) -> AbstractContextManager[object]:
    """Within the context, set one element of the gradients that the last data rank adds to the first block
    to `value`."""
    accumulate = Gradients.accumulate
    is_hit = steps if callable(steps) else steps.__contains__

    def spoil(self: Gradients, unit: int, gradients: Sequence[Tensor]) -> None:
        if unit == UNIT and is_hit(self._trace._step) and self._groups.data_rank == self._layout.data - 1:
            gradients = [gradient.clone() for gradient in gradients]
            gradients[-1].view(-1)[0] = value
        accumulate(self, unit, gradients)

    return patch.object(Gradients, "accumulate", spoil)


def rank(number: int, config: PhaseConfig, step: int, folder: Path) -> None:
    """Run one rank of two; write the message of its error into `folder`."""
    corpus = load_corpus(config.data, config.model.sequence_length)
    try:
        with spoilt({step}):
            train_phase(config, corpus, Ranks(number, 2, torch.device("cpu")), lambda: False)
    except Exception as error:
        (folder / f"{number}").write_text(str(error))
    # Skip the teardown: the other rank's process groups may be gone.
    os._exit(0)

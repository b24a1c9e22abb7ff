"""The validation loss: the same windows, in the same groups, summed in the same order, on any number of ranks."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pseudoreal_trainer.data.baseline import order2_nats
from pseudoreal_trainer.data.corpus import Bytes, Corpus
from pseudoreal_trainer.data.stream import take_windows
from pseudoreal_trainer.engine.engine import Engine
from pseudoreal_trainer.training.step import tokens_of

_GROUP = 8
"""Windows that pass through the model together. Fixed, because sums depend on the shapes of the products."""


@dataclass(frozen=True)
class Validation:
    windows: Bytes
    """[W, T + 1]"""

    @property
    def tokens(self) -> int:
        return len(self.windows) * len(self.windows[0, 1:])

    def measure(self, engine: Engine) -> float:
        """Nats per token; the same bits on every rank. Every rank calls this."""
        grid = engine.grid
        groups = np.array_split(self.windows, range(_GROUP, len(self.windows), _GROUP))
        turns = -(-len(groups) // grid.layout.data)
        # Data ranks without a group in the last turn measure one once more: all take part in every collective.
        own = [min(turn * grid.layout.data + grid.data_rank, len(groups) - 1) for turn in range(turns)]
        batch = _Groups([tokens_of(groups[index], grid.device) for index in own])
        sums = torch.zeros(len(groups), dtype=torch.float64, device=grid.device)
        for turn, loss in engine.evaluate(batch, turns).items():
            if turn * grid.layout.data + grid.data_rank < len(groups):
                sums[own[turn]] = loss
        # Every entry is zero on all ranks but one, so the order of this reduction cannot matter.
        return float(sum(grid.ranks.sum_(sums).tolist())) / self.tokens


@dataclass(frozen=True)
class _Groups:
    groups: list[Tensor]

    def shape(self, micro_batch: int) -> tuple[int, int]:
        windows = self.groups[micro_batch]
        return windows.shape[0], windows.shape[1] - 1

    def tokens(self, micro_batch: int) -> Tensor:
        return self.groups[micro_batch]


def window_starts(corpus: Corpus, sequence: int, most: int) -> list[int]:
    """At most `most` windows, spread evenly over the validation part, without overlap."""
    available = (len(corpus.validation) - 1) // sequence
    count = min(most, available)
    return [index * available // count * sequence for index in range(count)]


def build_validation(corpus: Corpus, sequence: int, most: int) -> Validation:
    return Validation(take_windows(corpus.validation, window_starts(corpus, sequence, most), sequence))


def baseline_nats(corpus: Corpus, sequence: int, most: int) -> float:
    """The order-2 model on exactly the bytes that the validation loss measures; it may see the two bytes before each,
    also where they lie outside of the window."""
    starts: NDArray[np.int64] = np.array(window_starts(corpus, sequence, most)) + len(corpus.train)
    targets = (starts[:, None] + np.arange(1, sequence + 1)).flatten()
    return order2_nats(corpus.train, np.concatenate((corpus.train, corpus.validation)), targets)

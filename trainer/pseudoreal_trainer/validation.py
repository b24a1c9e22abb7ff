"""The validation loss: the same windows, in the same groups, summed in the same order, on any number of ranks."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from pseudoreal_api.model_spec import Precision

from pseudoreal_trainer.baseline import order2_nats
from pseudoreal_trainer.compute import loss_sum
from pseudoreal_trainer.corpus import Bytes, Corpus
from pseudoreal_trainer.model import Transformer
from pseudoreal_trainer.ranks import Ranks
from pseudoreal_trainer.stream import take_windows

_GROUP = 8
"""Windows that pass through the model together. Fixed, because sums depend on the shapes of the products."""


@dataclass(frozen=True)
class Validation:
    windows: Bytes
    """[W, T + 1]"""
    precision: Precision

    @property
    def tokens(self) -> int:
        return len(self.windows) * len(self.windows[0, 1:])

    @torch.no_grad()
    def measure(self, model: Transformer, ranks: Ranks) -> float:
        """Nats per token; the same bits on every rank."""
        groups = np.array_split(self.windows, range(_GROUP, len(self.windows), _GROUP))
        sums = torch.zeros(len(groups), dtype=torch.float64, device=ranks.device)
        for index in range(ranks.rank, len(groups), ranks.world):
            sums[index] = loss_sum(model, groups[index], self.precision).double()
        # Every entry is zero on all ranks but one, so the order of this reduction cannot matter.
        return float(sum(ranks.sum_(sums).tolist())) / self.tokens


def window_starts(corpus: Corpus, sequence: int, most: int) -> list[int]:
    """At most `most` windows, spread evenly over the validation part, without overlap."""
    available = (len(corpus.validation) - 1) // sequence
    count = min(most, available)
    return [index * available // count * sequence for index in range(count)]


def build_validation(corpus: Corpus, sequence: int, most: int, precision: Precision) -> Validation:
    return Validation(take_windows(corpus.validation, window_starts(corpus, sequence, most), sequence), precision)


def baseline_nats(corpus: Corpus, sequence: int, most: int) -> float:
    """The order-2 model on exactly the bytes that the validation loss measures; it may see the two bytes before each,
    also where they lie outside of the window."""
    starts: NDArray[np.int64] = np.array(window_starts(corpus, sequence, most)) + len(corpus.train)
    targets = (starts[:, None] + np.arange(1, sequence + 1)).flatten()
    return order2_nats(corpus.train, np.concatenate((corpus.train, corpus.validation)), targets)

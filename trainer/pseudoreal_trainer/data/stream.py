"""The order of samples. A sample is determined by one global cursor, the number of samples consumed since the job's
start: restarts, changes of phase and other numbers of ranks neither repeat nor skip a sample. Pure."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from pseudoreal_api.spec.phase import Batch

from pseudoreal_trainer.data.corpus import Bytes
from pseudoreal_trainer.data.permutation import permute

Indices = NDArray[np.int64]
Part = tuple[int, int]
"""Cursors [first, end) of a rank's samples in one micro-batch."""


@dataclass(frozen=True)
class Stream:
    """Samples of a text: windows without overlap, in another order in every epoch."""

    text: Bytes
    sequence: int
    seed: int

    @property
    def samples(self) -> int:
        """Number of samples in an epoch. A window has one byte more than `sequence`: the target of its last
        position."""
        return (len(self.text) - 1) // self.sequence

    def windows_at(self, first: int, end: int) -> Indices:
        """Return the window indices of the samples at the cursors first..end-1, [end - first]."""
        return shuffled(np.arange(first, end), self.samples, self.seed)

    def windows(self, first: int, end: int) -> Bytes:
        """Return the samples at the cursors first..end-1, [end - first, sequence + 1]."""
        return take_windows(self.text, self.windows_at(first, end) * self.sequence, self.sequence)


def shuffled(numbers: Indices, samples: int, seed: int, *key: int) -> Indices:
    """Return the window index, below `samples`, of each of the samples `numbers` of a text, [len(numbers)]. Every epoch
    has its own order; `key` distinguishes texts of the same size."""
    epochs, positions = np.divmod(numbers, samples)
    found = np.empty(len(numbers), dtype=np.int64)
    for epoch in np.unique(epochs).tolist():
        rows = epochs == epoch
        found[rows] = permute(positions[rows].astype(np.uint64), samples, seed, epoch, *key).astype(np.int64)
    return found


def spread_starts(tokens: int, sequence: int, most: int) -> Indices:
    """Return the index of the first token of each of at most `most` windows for validation, spread evenly over a text,
    without overlap. The same arguments always give the same windows."""
    available = (tokens - 1) // sequence
    count = min(most, available)
    return np.arange(count) * available // count * sequence


def take_windows(text: Bytes, starts: Indices, sequence: int) -> Bytes:
    """Return the windows that start at `starts`, [len(starts), sequence + 1]."""
    windows: Bytes = text[starts[:, None] + np.arange(sequence + 1)]
    return windows


def rank_parts(batch: Batch, cursor: int, rank: int, ranks: int) -> list[Part]:
    """Return the cursors of a rank's samples, for each micro-batch of the step that starts at `cursor`.

    Parts may be empty: a micro-batch can have fewer sequences than there are ranks.
    """
    width = batch.sequences // batch.micro_batches
    begins = range(cursor, cursor + batch.sequences, width)
    return [(begin + width * rank // ranks, begin + width * (rank + 1) // ranks) for begin in begins]

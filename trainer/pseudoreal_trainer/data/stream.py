"""Which sample comes when. One global cursor, the number of samples consumed since the job's start, decides; so no
number of ranks, no restart and no change of phase repeats or skips a sample. Pure."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from pseudoreal_api.phase_spec import Batch

from pseudoreal_trainer.data.corpus import Bytes


@dataclass(frozen=True)
class Stream:
    """Samples are the non-overlapping windows of a text; every epoch has its own order."""

    text: Bytes
    sequence: int
    seed: int

    @property
    def samples(self) -> int:
        """Samples of an epoch. A window has one byte more than `sequence`: the target of its last position."""
        return (len(self.text) - 1) // self.sequence

    def window_at(self, cursor: int) -> int:
        """Window that the sample at `cursor` is."""
        epoch, position = divmod(cursor, self.samples)
        return int(_order(self.samples, self.seed, epoch)[position])

    def windows(self, first: int, end: int) -> Bytes:
        """The samples at the cursors first..end-1, [end - first, sequence + 1]."""
        return take_windows(self.text, [self.window_at(c) * self.sequence for c in range(first, end)], self.sequence)


def take_windows(text: Bytes, starts: list[int], sequence: int) -> Bytes:
    """[len(starts), sequence + 1]"""
    windows: Bytes = text[np.array(starts, dtype=np.int64)[:, None] + np.arange(sequence + 1)]
    return windows


def rank_parts(batch: Batch, cursor: int, rank: int, ranks: int) -> list[tuple[int, int]]:
    """Cursors [first, end) that a rank trains on, for each micro-batch of the step that starts at `cursor`.

    A rank's part is empty when a micro-batch has fewer sequences than there are ranks.
    """
    width = batch.sequences // batch.micro_batches
    begins = range(cursor, cursor + batch.sequences, width)
    return [(begin + width * rank // ranks, begin + width * (rank + 1) // ranks) for begin in begins]


@lru_cache(maxsize=2)
def _order(samples: int, seed: int, epoch: int) -> NDArray[np.int64]:
    return np.random.Generator(np.random.PCG64([seed, epoch])).permutation(samples)

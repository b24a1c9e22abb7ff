"""Interface of a stack: its input and its output."""

from collections.abc import Iterator
from typing import Protocol

from torch import Tensor

from benchmarks.moe.beside.cases import Case


class Stack(Protocol):
    """One way to train a mixture over several ranks. `dist` has its gloo group when the stack is called."""

    def __call__(self, case: Case, batches: Tensor, rank: int, world: int) -> Iterator[Tensor]:
        """Yield, for each of the batches, [steps, sequences, T + 1] over all ranks, the mean loss over this rank's
        share.

        The loss is the loss before the update. All work of a step happens between two yields.
        """
        ...

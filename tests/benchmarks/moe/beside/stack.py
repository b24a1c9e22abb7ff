"""What a stack is asked to train, and what it answers."""

from collections.abc import Iterator
from typing import Protocol

from torch import Tensor

from tests.benchmarks.moe.beside.cases import Case


class Stack(Protocol):
    """One way to train a mixture over several ranks; `dist` has its gloo group when it is called."""

    def __call__(self, case: Case, batches: Tensor, rank: int, world: int) -> Iterator[Tensor]:
        """Yields, after each of the batches, [steps, sequences, T + 1] over all ranks, the mean loss over this rank's
        share of it (before the update). All that a step needs happens between two yields."""
        ...

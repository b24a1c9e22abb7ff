"""Assignment of sequences to data ranks in an evaluation, run by run of the engine. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class AssignedSequence:
    """A sequence that a data rank evaluates in a run of the engine."""

    index: int
    """Index of the sequence."""
    counts: bool
    """Whether this rank's result counts; if not, another rank's does, and this rank only takes part in the
    collectives."""


def assign_sequences(count: int, data: int, data_rank: int, at_once: int) -> Iterator[list[AssignedSequence]]:
    """Yield the sequences of one of `data` ranks, at most `at_once` per run. Every rank has as many runs, and as many
    sequences in each. Each of the `count` sequences counts on one rank."""
    own = [first + data_rank for first in range(0, count, data)]
    for begin in range(0, len(own), at_once):
        yield [AssignedSequence(min(index, count - 1), index < count) for index in own[begin : begin + at_once]]

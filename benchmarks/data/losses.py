"""The loss of large vocabularies: ours in chunks of tokens, beside unchunked logits in plain torch. Turns alternate,
each in a process of its own."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pseudoreal_dev.machine.progress import progress
from pydantic import BaseModel

from benchmarks.data import child
from benchmarks.data.results import OURS, WHOLE, Cell, Losses
from benchmarks.data.same import largest_difference

STACKS = (OURS, WHOLE)


@dataclass(frozen=True)
class Size:
    tokens: int
    hidden: int
    vocabularies: tuple[int, ...]
    rounds: int
    timed: int
    """Timed passes of a turn, after one untimed pass."""


FULL = Size(4096, 256, (32_768, 131_072), 2, 3)
TINY = Size(64, 8, (97, 300), 2, 2)


class Case(BaseModel, frozen=True):
    stack: str
    tokens: int
    hidden: int
    vocabulary: int
    passes: int


class Passes(BaseModel, frozen=True):
    seconds: list[float]
    """Seconds of each pass, including the first."""
    peak_bytes: int
    """Peak memory of the passes in bytes, without the input."""
    values: list[float]
    """The loss, and the norms of the gradients of the input, the norm's weight and the head's matrix."""


Turn = tuple[Case, Passes]


def cases(size: Size) -> list[Case]:
    """Return all turns in their order: the stacks of a vocabulary follow each other."""
    return [
        Case(stack=stack, tokens=size.tokens, hidden=size.hidden, vocabulary=vocabulary, passes=1 + size.timed)
        for _ in range(size.rounds)
        for vocabulary in size.vocabularies
        for stack in STACKS
    ]


def measure(_: Path, tiny: bool) -> Losses:
    size = TINY if tiny else FULL
    turns = []
    for case in cases(size):
        with progress.step(f"loss of {case.vocabulary:,} tokens: {case.stack}"):
            turns.append((case, child.run("loss", case, Passes, threads=child.THREADS)))
    return summed_up(size, turns)


def summed_up(size: Size, turns: Sequence[Turn]) -> Losses:
    """Summarize the turns. Raises LossesDiffer if two turns of a vocabulary differ in the loss or in a gradient."""
    for vocabulary in size.vocabularies:
        first, *others = [turn for turn in turns if turn[0].vocabulary == vocabulary]
        for case, found in others:
            what = f"the loss of {vocabulary:,} tokens"
            largest_difference(f"{what} by {case.stack}", found.values, first[0].stack, first[1].values)
    cells = [_cell(stack, vocabulary, turns) for vocabulary in size.vocabularies for stack in STACKS]
    return Losses(cells=cells, tokens=size.tokens, hidden=size.hidden)


def _cell(stack: str, vocabulary: int, turns: Sequence[Turn]) -> Cell:
    own = [passes for case, passes in turns if (case.stack, case.vocabulary) == (stack, vocabulary)]
    return Cell(
        stack=stack,
        case=f"{vocabulary:,}",
        seconds=[second for passes in own for second in passes.seconds[1:]],
        peak_bytes=max(passes.peak_bytes for passes in own),
    )

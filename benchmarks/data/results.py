"""Results of `make bench-data` on disk. Pure except for reading and writing."""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from pydantic import BaseModel

from benchmarks.machine import Stamp
from benchmarks.results import RESULTS, SCRATCH, Machine
from benchmarks.summary import Timing, timing

DATA = RESULTS / "data.json"
LOG = SCRATCH / "data.log"
"""Output of the measured programs."""

OURS, ORDERED = "pseudoreal", "pseudoreal, with the order"
ALONE = "tokenizers alone"
MEGATRON, LONG, DATATROVE = "Megatron", "Megatron, long documents", "datatrove"
WHOLE = "whole logits"
PLAIN = "torch and transformers"

Temperature = Literal["warm", "cold"]


class Cell(BaseModel, frozen=True):
    """One stack in one case: seconds of each turn, or of each timed step of all turns."""

    stack: str
    case: str
    seconds: list[float]
    peak_bytes: int | None = None
    """Peak growth of the process's memory in bytes; None if not measured."""

    @property
    def timing(self) -> Timing:
        return timing(self.seconds)


class Cells(BaseModel, frozen=True):
    cells: list[Cell]

    def cell(self, stack: str, case: str) -> Cell:
        return next(cell for cell in self.cells if (cell.stack, cell.case) == (stack, case))

    def ratio(self, stack: str, case: str) -> float | None:
        """Return the stack's time divided by ours (above 1, ours is faster); None if either cell was not quiet."""
        theirs, ours = self.cell(stack, case).timing, self.cell(OURS, case).timing
        return theirs.milliseconds / ours.milliseconds if theirs.is_quiet and ours.is_quiet else None

    @property
    def cases(self) -> list[str]:
        return [*dict.fromkeys(cell.case for cell in self.cells)]

    @property
    def stacks(self) -> list[str]:
        return [*dict.fromkeys(cell.stack for cell in self.cells)]


class Preparing(Cells, frozen=True):
    text_bytes: int
    documents: int
    vocabulary: int
    train_seconds: float
    """Seconds to train the tokenizer on the same text."""


class Reading(Cells, frozen=True):
    file_bytes: int
    window: int
    """Tokens of a window."""
    windows: dict[Temperature, int]
    """Windows of a turn."""
    versions: dict[str, str]
    """Versions of the other readers' packages."""


class Resident(BaseModel, frozen=True):
    """Memory of a process that reads a corpus."""

    samples: int
    sequence: int
    token_bytes: int
    files: int
    steps: int
    batch: int
    """Samples per step."""
    before_bytes: int
    """Resident memory in bytes after importing everything that a rank imports."""
    grown_bytes: int
    """Peak growth of the resident memory in bytes."""

    @property
    def total_bytes(self) -> int:
        return self.before_bytes + self.grown_bytes


class Losses(Cells, frozen=True):
    """Times of the loss; the case is the vocabulary size."""

    tokens: int
    hidden: int


class Training(Cells, frozen=True):
    """A model trained by two stacks, in a single case."""

    model: str
    """Description of the model."""
    parameters: int
    threads: int
    sequences: int
    sequence_length: int
    steps: int
    """Steps of a turn, including warm-up."""
    first_loss: float
    last_loss: float
    apart: float
    """Largest relative difference of two losses of the same step."""
    waited: list[float]
    """Share of the steps' time spent waiting for data, per turn."""


Part = Preparing | Reading | Resident | Losses | Training


class Results(BaseModel, frozen=True):
    machine: Machine
    preparing: Preparing | None = None
    reading: Reading | None = None
    resident: Resident | None = None
    losses: Losses | None = None
    training: Training | None = None
    measured: dict[str, Stamp] = {}
    """Date and commit of each part's measurement, by the part's name."""

    def with_part(self, name: str, part: Part, stamp: Stamp, machine: Machine) -> "Results":
        return self.model_copy(update={name: part, "machine": machine, "measured": self.measured | {name: stamp}})

    @property
    def timed(self) -> Iterator[Cells]:
        """Yield the parts that have cells."""
        for part in (self.preparing, self.reading, self.losses, self.training):
            if part is not None:
                yield part


def read(path: Path = DATA) -> Results | None:
    """Return the newest results; None if there are none."""
    return Results.model_validate_json(path.read_bytes()) if path.exists() else None


def write(results: Results, path: Path = DATA) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(results.model_dump_json(indent=1) + "\n")

"""What `make bench-data` measures, on disk. Pure but for reading and writing."""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from pydantic import BaseModel

from tests.benchmarks.machine import Stamp
from tests.benchmarks.results import RESULTS, Machine
from tests.benchmarks.summary import Timing, timing

DATA = RESULTS / "data.json"
LOG = RESULTS / "data.log"
"""What the programs say that are measured."""

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
    """Most memory beyond what the process had before; None where it was not measured."""

    @property
    def timing(self) -> Timing:
        return timing(self.seconds)


class Cells(BaseModel, frozen=True):
    cells: list[Cell]

    def cell(self, stack: str, case: str) -> Cell:
        return next(cell for cell in self.cells if (cell.stack, cell.case) == (stack, case))

    def ratio(self, stack: str, case: str) -> float | None:
        """The stack's time over ours: above 1, ours is faster. None where one of them was not quiet."""
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
    """Seconds of training the tokenizer on the same text."""


class Reading(Cells, frozen=True):
    file_bytes: int
    window: int
    """Tokens of a window."""
    windows: dict[Temperature, int]
    """Windows of a turn."""
    versions: dict[str, str]
    """Versions of the packages of the other readers."""


class Resident(BaseModel, frozen=True):
    """Memory of a process that reads a corpus."""

    samples: int
    sequence: int
    token_bytes: int
    files: int
    steps: int
    batch: int
    """Samples of a step."""
    before_bytes: int
    """Resident memory once everything is imported that a rank imports."""
    grown_bytes: int
    """Growth of the resident memory, at its peak."""

    @property
    def total_bytes(self) -> int:
        return self.before_bytes + self.grown_bytes


class Losses(Cells, frozen=True):
    """The cases are vocabularies."""

    tokens: int
    hidden: int


class Training(Cells, frozen=True):
    """A model that two stacks train. There is one case."""

    model: str
    """The model in words."""
    parameters: int
    threads: int
    sequences: int
    sequence_length: int
    steps: int
    """Steps of a turn, those of the warm-up too."""
    first_loss: float
    last_loss: float
    apart: float
    """Largest relative difference of two losses of the same step."""
    waited: list[float]
    """Share of the steps' time for which training waited for data, of each turn."""


Part = Preparing | Reading | Resident | Losses | Training


class Results(BaseModel, frozen=True):
    machine: Machine
    preparing: Preparing | None = None
    reading: Reading | None = None
    resident: Resident | None = None
    losses: Losses | None = None
    training: Training | None = None
    measured: dict[str, Stamp] = {}
    """When, and of what, by the name of the part."""

    def with_part(self, name: str, part: Part, stamp: Stamp, machine: Machine) -> "Results":
        return self.model_copy(update={name: part, "machine": machine, "measured": self.measured | {name: stamp}})

    @property
    def timed(self) -> Iterator[Cells]:
        """Parts with cells."""
        for part in (self.preparing, self.reading, self.losses, self.training):
            if part is not None:
                yield part


def read(path: Path = DATA) -> Results | None:
    """The newest results; None if there are none."""
    return Results.model_validate_json(path.read_bytes()) if path.exists() else None


def write(results: Results, path: Path = DATA) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(results.model_dump_json(indent=1) + "\n")

"""Step times of `make bench-moe` on disk. Pure except for reading and writing."""

from pathlib import Path
from statistics import median

from pydantic import BaseModel

from benchmarks.machine import Stamp
from benchmarks.moe.beside.cases import WARM_UP, Case
from benchmarks.results import RESULTS, SCRATCH, Machine

STEPS = RESULTS / "moe-steps.json"
LOG = SCRATCH / "moe.log"
"""Output of the measured programs."""


class Step(BaseModel, frozen=True):
    seconds: float
    processor: float
    """Processor seconds of all threads of a rank, averaged over the ranks."""
    loss: float
    """Mean over the step's tokens in nats, before the update."""


class Run(BaseModel, frozen=True):
    """One start of a stack in one case."""

    stack: str
    case: Case
    steps: list[Step] = []
    """All steps, with the warm-up first; empty if the run failed."""
    error: str | None = None

    @property
    def timed(self) -> list[Step]:
        return self.steps[WARM_UP:]


class Beside(BaseModel, frozen=True):
    runs: list[Run]
    """In order of the turns: runs of a stack and case are in order of the rounds."""
    versions: dict[str, str]

    def of(self, stack: str, case: Case) -> list[Run]:
        return [run for run in self.runs if (run.stack, run.case) == (stack, case)]


class Turn(BaseModel, frozen=True):
    """A few steps of one engine, including the end of their updates, before another engine's turn; seconds per step."""

    seconds: float
    passes: float
    """Processor seconds of the thread that runs the passes."""
    others: float
    """Processor seconds of all other threads, which reduce, update, fetch, and read and write the disk."""


class Taken(BaseModel, frozen=True):
    """Measurements of one job."""

    label: str
    turns: list[Turn]
    """Entry i of all jobs was measured at about the same time."""
    losses: list[float]
    dropped: float
    """Share of the choices refused by full experts."""

    @property
    def passes(self) -> float:
        return median(turn.passes for turn in self.turns)

    @property
    def others(self) -> float:
        return median(turn.others for turn in self.turns)


def ratio(taken: Taken, base: Taken) -> float:
    """Return the median over the turns of the time divided by the base's time in the same turn."""
    return median(one.seconds / other.seconds for one, other in zip(taken.turns, base.turns, strict=True))


class Product(BaseModel, frozen=True):
    """Forward and backward products of experts, computed in one way and dtype: seconds, or an error."""

    experts: int
    dtype: str
    way: str
    turns: list[float] = []
    error: str | None = None


class Results(BaseModel, frozen=True):
    machine: Machine
    beside: Beside | None = None
    growth: dict[str, list[Taken]] | None = None
    """By name of the curve; one entry per number of experts."""
    routing: dict[str, list[Taken]] | None = None
    """By k: prototypes and top-k."""
    grouped: list[Product] | None = None
    measured: dict[str, Stamp] = {}
    """Date and commit of each part's measurement, by the part's name."""


def read(path: Path = STEPS) -> Results | None:
    """Return the newest results; None if there are none."""
    return Results.model_validate_json(path.read_bytes()) if path.exists() else None


def write(results: Results, path: Path = STEPS) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(results.model_dump_json(indent=1) + "\n")

"""What `make bench-moe` measures in seconds, on disk. Pure but for reading and writing."""

from pathlib import Path
from statistics import median

from pydantic import BaseModel

from tests.benchmarks.machine import Stamp
from tests.benchmarks.moe.beside.cases import WARM_UP, Case
from tests.benchmarks.results import RESULTS, Machine

STEPS = RESULTS / "moe-steps.json"
LOG = RESULTS / "moe.log"
"""What the programs say that are measured."""


class Step(BaseModel, frozen=True):
    seconds: float
    processor: float
    """Processor seconds of all threads of a rank, in the mean over the ranks."""
    loss: float
    """Mean over the step's tokens, in nats, before the step's update."""


class Run(BaseModel, frozen=True):
    """One start of a stack in one case."""

    stack: str
    case: Case
    steps: list[Step] = []
    """The warm-up's too, at the front. Empty where it failed."""
    error: str | None = None

    @property
    def timed(self) -> list[Step]:
        return self.steps[WARM_UP:]


class Beside(BaseModel, frozen=True):
    runs: list[Run]
    """In turns: those of a stack and case in the order of the rounds."""
    versions: dict[str, str]

    def of(self, stack: str, case: Case) -> list[Run]:
        return [run for run in self.runs if (run.stack, run.case) == (stack, case)]


class Turn(BaseModel, frozen=True):
    """A few steps of one engine, before another one's turn, and the end of their updates: seconds of a step."""

    seconds: float
    passes: float
    """Processor seconds of the thread that makes the passes."""
    others: float
    """Processor seconds of all other threads: they reduce, update, fetch, and read and write the disk."""


class Taken(BaseModel, frozen=True):
    """What one job has taken."""

    label: str
    turns: list[Turn]
    """Entry i of several jobs was measured at about the same time."""
    losses: list[float]
    dropped: float
    """Share of the choices that experts refused as they were full."""

    @property
    def passes(self) -> float:
        return median(turn.passes for turn in self.turns)

    @property
    def others(self) -> float:
        return median(turn.others for turn in self.turns)


def ratio(taken: Taken, base: Taken) -> float:
    """The median over the turns of the time over the base's in the same turn."""
    return median(one.seconds / other.seconds for one, other in zip(taken.turns, base.turns, strict=True))


class Product(BaseModel, frozen=True):
    """Forward and backward products of experts, in one way and type: microseconds, or an error."""

    experts: int
    dtype: str
    way: str
    turns: list[float] = []
    error: str | None = None


class Results(BaseModel, frozen=True):
    machine: Machine
    beside: Beside | None = None
    growth: dict[str, list[Taken]] | None = None
    """By the name of the curve, entry by entry for the numbers of experts."""
    routing: dict[str, list[Taken]] | None = None
    """By k: prototypes and top k."""
    grouped: list[Product] | None = None
    measured: dict[str, Stamp] = {}
    """When, and of what, by the name of the part."""


def read(path: Path = STEPS) -> Results | None:
    """The newest results; None if there are none."""
    return Results.model_validate_json(path.read_bytes()) if path.exists() else None


def write(results: Results, path: Path = STEPS) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(results.model_dump_json(indent=1) + "\n")

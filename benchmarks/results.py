"""Raw results on disk: the stack and case of each run, and each step's seconds and loss."""

from pathlib import Path

from pydantic import BaseModel

from benchmarks.cases import Case

RESULTS = Path("docs/data")
"""Raw numbers, in git: anyone can write the reports again."""
SCRATCH = Path("benchmark-results")
"""Logs and temporary files, on the disk of the repository, because the system's temporary folder may be in memory."""
TRAINER = RESULTS / "trainer.json"
PARTIAL = SCRATCH / "partial.json"
"""Results of a run that left out cases; not used by the report."""


class Machine(BaseModel, frozen=True):
    processor: str
    cores: int
    memory_gib: float
    versions: dict[str, str]
    """Versions of Python and of the compared packages."""
    date: str = "an unknown day"
    commit: str = "an unknown commit"
    """Commit of this project."""
    release: str = "0"
    """Version of this project at the commit."""

    @property
    def hardware(self) -> str:
        return f"{self.cores} cores ({self.processor}), {self.memory_gib} GiB of memory"


class Step(BaseModel, frozen=True):
    seconds: float
    loss: float
    """Mean over the step's tokens in nats, before the update."""


class Run(BaseModel, frozen=True):
    """One start of a stack: its processes, their warm-up and the timed steps."""

    stack: str
    case: Case
    round: int
    warm_up: int
    steps: list[Step]
    """All steps, with the warm-up first."""
    crashed_at_end: bool = False
    """True if the processes crashed while ending, after the last step."""

    @property
    def timed_seconds(self) -> list[float]:
        return [step.seconds for step in self.steps[self.warm_up :]]


class Results(BaseModel, frozen=True):
    machine: Machine
    runs: list[Run]


def write(results: Results, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(results.model_dump_json(indent=1) + "\n")


def read(path: Path) -> Results:
    return Results.model_validate_json(path.read_text())

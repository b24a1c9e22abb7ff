"""What is measured side by side, as it is stored."""

from pathlib import Path

from pydantic import BaseModel

from tests.benchmarks.operator.results import Quantiles
from tests.benchmarks.results import RESULTS

BESIDE = RESULTS / "operator-beside.json"


class Idle(BaseModel, frozen=True):
    """Figures of the time after the last job ended."""

    seconds: float
    processor_share: float
    """Share of one processor."""
    requests: int
    writes: int


class Life(BaseModel, frozen=True):
    """The lives of jobs that were applied together, under one stack."""

    stack: str
    jobs: int
    workers: int
    """Pods of a phase."""
    seconds: float
    """From the first request that applied a job until the last one was said to have ended."""
    requests: dict[str, float]
    """Requests of the controllers for a job, by verb and resource."""
    writes: float
    """Those among them that changed a job, its status or its children, for a job."""
    processor_seconds: float
    """Processor seconds of the controllers."""
    servers_seconds: float
    """Processor seconds of etcd, the API server and the controller manager meanwhile."""
    peak_bytes: int
    """Most resident memory of each controller, added up."""
    reaction: Quantiles
    """From the end of the last pod that decides a job's end until it was said to have ended."""
    others: float
    """Processors that programs took meanwhile which have nothing to do with this."""
    idle: Idle

    @property
    def jobs_per_second(self) -> float:
        return self.jobs / self.seconds

    @property
    def key(self) -> tuple[int, int, str]:
        return self.workers, self.jobs, self.stack


class Reporting(BaseModel, frozen=True):
    """What the reports of the pods of one job cost the operator, while nothing else happened."""

    pods: int
    reports_per_second: float
    """Reports that were taken."""
    refused: int
    processor_share: float
    """Share of one processor."""
    writes_per_minute: float
    peak_bytes: int

    @property
    def milliseconds(self) -> float:
        """Processor time for a report."""
        return 1000 * self.processor_share / self.reports_per_second


class Lives(BaseModel):
    lives: list[Life] = []
    reporting: Reporting | None = None

    def with_life(self, life: Life) -> "Lives":
        """In the place of an older one of that stack under that load."""
        return self.model_copy(update={"lives": [*(known for known in self.lives if known.key != life.key), life]})


def read(path: Path = BESIDE) -> Lives:
    return Lives.model_validate_json(path.read_bytes()) if path.exists() else Lives()

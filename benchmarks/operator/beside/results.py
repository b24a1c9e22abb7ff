"""Stored results of the comparison."""

from pathlib import Path

from pydantic import BaseModel

from benchmarks.operator.results import Quantiles
from benchmarks.results import RESULTS

BESIDE = RESULTS / "operator-beside.json"


class Idle(BaseModel, frozen=True):
    """Figures of the time after the last job ended."""

    seconds: float
    processor_share: float
    """Share of one processor."""
    requests: int
    writes: int


class Life(BaseModel, frozen=True):
    """Lives of jobs that were applied together, under one stack."""

    stack: str
    jobs: int
    workers: int
    """Pods per phase."""
    seconds: float
    """From the first request that applied a job until the last job was reported as ended."""
    requests: dict[str, float]
    """The controllers' requests per job, by verb and resource."""
    writes: float
    """Requests per job that changed the job, its status or its children."""
    processor_seconds: float
    """Processor seconds of the controllers."""
    servers_seconds: float
    """Processor seconds of etcd, the API server and the controller manager in the same time."""
    peak_bytes: int
    """Sum of the controllers' peak resident bytes."""
    reaction: Quantiles
    """From the end of the last pod that decides a job's end until the job was reported as ended."""
    others: float
    """Processors used by unrelated programs in the same time."""
    idle: Idle

    @property
    def jobs_per_second(self) -> float:
        return self.jobs / self.seconds

    @property
    def key(self) -> tuple[int, int, str]:
        return self.workers, self.jobs, self.stack


class Reporting(BaseModel, frozen=True):
    """Cost of the reports of one job's pods for the operator, while nothing else happened."""

    pods: int
    reports_per_second: float
    """Accepted reports per second."""
    refused: int
    processor_share: float
    """Share of one processor."""
    writes_per_minute: float
    peak_bytes: int

    @property
    def milliseconds(self) -> float:
        """Processor time per report in milliseconds."""
        return 1000 * self.processor_share / self.reports_per_second


class Loss(BaseModel, frozen=True):
    """Loss of all pods of one job at once, until as many new pods ran."""

    stack: str
    workers: int
    lost_seconds: float
    """From the first lost pod until all were lost."""
    seconds: float
    """From the first lost pod until all new pods ran."""
    requests: int
    """The controllers' requests in this time."""
    servers_seconds: float
    """Processor seconds of etcd, the API server and the controller manager in this time."""


class Lives(BaseModel):
    lives: list[Life] = []
    losses: list[Loss] = []
    reporting: Reporting | None = None

    def with_life(self, life: Life) -> "Lives":
        """Return the results with this life in place of an older one of the same stack and load."""
        return self.model_copy(update={"lives": [*(known for known in self.lives if known.key != life.key), life]})

    def with_loss(self, loss: Loss) -> "Lives":
        """Return the results with this loss in place of an older one of the same stack and number of pods."""
        others = [known for known in self.losses if (known.stack, known.workers) != (loss.stack, loss.workers)]
        return self.model_copy(update={"losses": [*others, loss]})


def read(path: Path = BESIDE) -> Lives:
    return Lives.model_validate_json(path.read_bytes()) if path.exists() else Lives()

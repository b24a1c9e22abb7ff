"""Rows of docs/data/method.csv: the validation loss of each arm, size, seed and rate at each budget."""

import csv
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from pydantic import BaseModel

RESULTS = Path("docs/data/method.csv")
Role = Literal["tuning", "compared", "quick"]


class Result(BaseModel, frozen=True):
    study: Literal["dense", "experts"]
    role: Role
    width: int
    arm: str
    seed: int
    rate: float
    budget: float
    """Budget as a fraction of the full one."""
    steps: int
    """Steps of the budget."""
    tokens: int
    loss: float
    """Validation loss, nats per token."""
    validation_tokens: int
    seconds_per_step: float
    """Median of the decay's steps; on a CPU with one thread, beside another training."""
    peak_bytes: int
    """Growth of resident memory in the decay; on a GPU the peak of torch's memory there."""
    date: str
    commit: str
    device: str = "cpu"
    """Name of the GPU, or cpu."""


def read_results(path: Path = RESULTS) -> list[Result]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [Result.model_validate(row) for row in csv.DictReader(file)]


def write_results(results: Iterable[Result], path: Path = RESULTS) -> None:
    """Write the results in a fixed order, so that a difference of two versions shows new rows alone."""
    rows = sorted(results, key=lambda r: (r.study, r.role, r.width, r.arm, r.rate, r.seed, r.budget))
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, list(Result.model_fields), lineterminator="\n")
        table.writeheader()
        table.writerows(row.model_dump() for row in rows)

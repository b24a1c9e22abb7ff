"""Results of a run on a GPU, as one JSON object."""

from collections.abc import Sequence
from statistics import median, quantiles

from pydantic import BaseModel

from benchmarks.gpu.cases import Case, Point

RESULTS_FILE, DOCTOR_FILE = "gpu-bench.json", "gpu-doctor.json"
"""Names of the files of benchmark and doctor, also in the file that `benchmarks.gpu.collect` packs."""


class Machine(BaseModel, frozen=True):
    device: str
    driver: str
    versions: dict[str, str]
    cores: int
    memory_gib: float
    commit: str
    """Commit of the sources; a trailing + means modified files."""
    release: str = "0"
    """Version of this project."""
    date: str
    """ISO 8601, UTC."""


class Forecast(BaseModel, frozen=True):
    """The prediction of `pseudoreal plan` with speeds measured in the same run."""

    seconds: float
    device_bytes: int
    host_bytes: int


class Measured(BaseModel, frozen=True):
    """One batch size of a case."""

    point: Point
    seconds: tuple[float, ...]
    """Seconds of each timed step, from the loss of the step before to its own loss."""
    losses: tuple[float, ...]
    """Loss of every step including warm-up, in nats per token, before the update."""
    hidden_share: float | None
    """Share of the time of host-device copies during which kernels also run; None without copies or a GPU."""
    device_peak_bytes: int
    """Peak bytes of tensors; 0 without a GPU."""
    pinned_bytes: int
    """Pinned host bytes: the peak of torch's allocator including its rounding, plus memory pinned elsewhere."""
    host_peak_bytes: int
    """Peak resident bytes of the process so far."""
    forecast: Forecast | None
    """None for other stacks."""

    @property
    def median(self) -> float:
        return median(self.seconds)

    @property
    def quartiles(self) -> tuple[float, float]:
        first, _, third = quantiles(self.seconds, n=4, method="inclusive")
        return first, third

    @property
    def tokens_per_second(self) -> float:
        return self.point.tokens / self.median


class Record(BaseModel, frozen=True):
    """Outcome of a case."""

    case: Case
    measured: tuple[Measured, ...] = ()
    left_out: tuple[Point, ...] = ()
    """Points without time."""
    problem: str | None = None
    """Reason why the case ended before its last point; None if it did not."""
    seconds: float = 0.0
    """Seconds that the case took, including its start."""


class Results(BaseModel, frozen=True):
    machine: Machine
    is_tiny: bool
    """True if the models were tiny, only to try the program."""
    budget_seconds: float
    seconds: float
    disk: str
    """File system type of the home disk."""
    records: tuple[Record, ...]


def loss_differences(records: Sequence[Record]) -> dict[str, float]:
    """Return model -> largest relative difference between the losses of the stacks.

    Runs with the same home are compared, as far as their steps are the same. No step here is clipped, so all clippings
    give the same losses.
    """
    found: dict[str, float] = {}
    theirs = {(r.case.model, r.case.home): r for r in records if r.case.stack == "fully_shard"}
    for record in records:
        other = theirs.get((record.case.model, record.case.home))
        if record.case.stack == "fully_shard" or other is None:
            continue
        for mine, their in zip(record.measured, other.measured, strict=False):
            if mine.point != their.point:
                break  # the steps from here on start from different weights
            worst = max(abs(a / b - 1) for a, b in zip(mine.losses, their.losses, strict=True))
            found[record.case.model] = max(found.get(record.case.model, 0.0), worst)
    return found

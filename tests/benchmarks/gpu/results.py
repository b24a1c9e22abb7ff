"""What a run on a GPU found, as one JSON."""

from collections.abc import Sequence
from statistics import median, quantiles

from pydantic import BaseModel

from tests.benchmarks.gpu.cases import Case, Point


class Machine(BaseModel, frozen=True):
    device: str
    driver: str
    versions: dict[str, str]
    cores: int
    memory_gib: float
    commit: str
    """Commit of the sources; with a + behind it when files had changes."""
    date: str
    """ISO, UTC."""


class Forecast(BaseModel, frozen=True):
    """The forecast of `pseudoreal plan` with the speeds that were measured in the same run."""

    seconds: float
    device_bytes: int
    host_bytes: int


class Measured(BaseModel, frozen=True):
    """One batch size of a case."""

    point: Point
    seconds: tuple[float, ...]
    """Seconds of each timed step: from one step's loss being known to the next one's."""
    losses: tuple[float, ...]
    """Losses of all steps, those of the warm-up too; nats per token, before the update."""
    hidden_share: float | None
    """Share of the time in which something is copied between host and device that kernels run too. None: nothing was
    copied, or there is no GPU."""
    device_peak_bytes: int
    """Tensors, at most. 0 without a GPU."""
    pinned_bytes: int
    """Host memory that is pinned, by torch's allocator at most, with what it rounds up to, and besides it."""
    host_peak_bytes: int
    """Resident memory of the process so far, at most."""
    forecast: Forecast | None
    """None of other stacks."""

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
    """What became of a case."""

    case: Case
    measured: tuple[Measured, ...] = ()
    left_out: tuple[Point, ...] = ()
    """There was no time for these."""
    problem: str | None = None
    """Why it ended before its last point; None: it did not."""
    seconds: float = 0.0
    """Seconds that the case took, its start included."""


class Results(BaseModel, frozen=True):
    machine: Machine
    is_tiny: bool
    """Models so small that nothing but the program was tried."""
    budget_seconds: float
    seconds: float
    disk: str
    """Where the home disk was: the type of the file system."""
    records: tuple[Record, ...]


def loss_differences(records: Sequence[Record]) -> dict[str, float]:
    """Model -> how far the losses of the stacks lie apart at most, relative, where both clip the same and had the same
    steps before."""
    found: dict[str, float] = {}
    ours = {r.case.model: r for r in records if (r.case.stack, r.case.clipping) == ("pseudoreal", "Global")}
    for record in records:
        if record.case.stack == "pseudoreal" or (mine := ours.get(record.case.model)) is None:
            continue
        for one, other in zip(mine.measured, record.measured, strict=False):
            worst = max(abs(a / b - 1) for a, b in zip(one.losses, other.losses, strict=True))
            found[record.case.model] = max(found.get(record.case.model, 0.0), worst)
    return found

"""Final report of the demo: the losses of each phase, a plot of them, and a text sample."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from pseudoreal_api.status.status import PhaseStatus, PseudoRealJobStatus
from pseudoreal_trainer.cli.loss_picture import draw_losses
from rich.table import Table

from pseudoreal_dev.demo.job_logs import Event, named


@dataclass(frozen=True)
class Result:
    """Figures of a finished job; losses in nats per byte."""

    baseline: float
    validation_loss: float
    delinked: tuple[tuple[str, str], ...]
    """(Before, after) for each delink: the validation losses as reported in the status."""

    @property
    def better_by(self) -> float:
        """Relative improvement of the model's loss over the baseline's loss."""
        return 1 - self.validation_loss / self.baseline


def result(status: PseudoRealJobStatus, events: Sequence[Event]) -> Result:
    baseline = float(named(events, "corpus")[0]["order2_nats"])
    return Result(baseline, float(status.phases[-1].validation_loss or "nan"), delinks(status.phases))


def delinks(phases: Sequence[PhaseStatus]) -> tuple[tuple[str, str], ...]:
    """Return (before, after) for each delink: the validation losses as reported in the status; "" if missing."""
    return tuple(
        (before.validation_loss or "", after.start_validation_loss or "") for before, after in pairwise(phases)
    )


def losses(phases: Iterable[PhaseStatus], token: str) -> Table:
    """Return a table of the losses of all phases; `token` is the word for the job's unit of text: byte or token."""
    columns = ("phase", "last step", "loss", "validation loss at its start", "at its end", "checkpoint")
    table = Table(*columns, title=f"Losses, in nats per {token}")
    for phase in phases:
        values = (phase.step, phase.loss, phase.start_validation_loss, phase.validation_loss, phase.end_checkpoint)
        table.add_row(phase.name, *("" if value is None else str(value) for value in values))
    return table


def sentences(found: Result) -> list[str]:
    lines = [
        f"validation loss {found.validation_loss:.4f} against {found.baseline:.4f} of an order-2 byte model on the same"
        f" text: {found.better_by:.0%} lower"
    ]
    return lines + delink_sentences(found.delinked)


def delink_sentences(delinked: Iterable[tuple[str, str]]) -> list[str]:
    return [f"delinking changed nothing: {before} before, {after} after" for before, after in delinked]


def draw(events: Sequence[Event], baseline: float, path: Path) -> None:
    """Plot the loss against the step, with one colour per phase."""
    draw_losses(named(events, "progress"), path, "PseudoRealJob quickstart", "byte", baseline)

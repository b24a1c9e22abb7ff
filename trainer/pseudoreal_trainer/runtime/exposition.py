"""Metrics of a pod in the Prometheus text format 0.0.4. Pure.

The format takes a few lines here; the client library would add a layer to the image. Job, phase and execution are
labels of the pod, added by the scraper.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pseudoreal_api.wire.messages import ProgressReport
from pseudoreal_api.wire.reports import PodReport

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_PREFIX = "pseudoreal_trainer_"

_PROGRESS = {
    "step": "Training steps done, from the job's start.",
    "total_steps": "Step at which the last phase ends at the latest.",
    "tokens": "Tokens trained, from the job's start.",
    "loss": "Training loss of the newest step, in nats per token.",
    "validation_loss": "Newest validation loss, in nats per token.",
    "learning_rate": "Learning rate of the newest step.",
    "gradient_norm": "L2 norm of the newest step's gradient before clipping.",
    "tokens_per_second": "Rate over the newest steps.",
    "step_seconds": "Seconds of a step, in the mean over the newest ones.",
    "remaining_seconds": "Estimate of the seconds that the phase still takes.",
    "skipped_steps": "Steps whose updates were left out, from the job's start.",
    "teraflops_per_second": "Rate of each rank, in 10^12 operations of the model a second.",
    "mfu": "That rate as a share of the device's peak.",
    "device_bytes": "Most memory of its GPU that rank 0 has taken.",
    "host_bytes": "Most memory of the host that rank 0 has taken.",
}
"""HELP texts of the gauges from a progress report's fields. A field with value None has no sample."""


@dataclass(frozen=True)
class _Family:
    name: str
    kind: str
    meaning: str
    samples: Sequence[tuple[str, float]]
    """Pairs of labels in braces (or an empty string) and value."""

    def lines(self) -> Iterator[str]:
        yield f"# HELP {_PREFIX}{self.name} {self.meaning}"
        yield f"# TYPE {_PREFIX}{self.name} {self.kind}"
        for labels, value in self.samples:
            yield f"{_PREFIX}{self.name}{labels} {float(value)!r}"


def exposition(report: PodReport) -> str:
    """Return the metrics text. Families without samples are omitted: only the pod of rank 0 knows the progress."""
    families = [*_of_progress(report.progress), *_of_checkpoint(report), *_of_ranks(report)]
    return "".join(f"{line}\n" for family in families if family.samples for line in family.lines())


def _of_progress(progress: ProgressReport | None) -> Iterator[_Family]:
    if progress is None:
        return
    for name, meaning in _PROGRESS.items():
        value = getattr(progress, name)
        yield _Family(name, "gauge", meaning, [] if value is None else [("", value)])
    what = "Seconds that steps have taken, from the start of the process."
    yield _Family("steps_seconds_total", "counter", what, [("", progress.seconds)])
    what = "Seconds of these in which rank 0 waited: for data, for reductions among ranks, for updates in the home."
    waits = [(f'{{for="{name}"}}', seconds) for name, seconds in progress.waits.items()]
    yield _Family("wait_seconds_total", "counter", what, waits)


def _of_checkpoint(report: PodReport) -> Iterator[_Family]:
    if (saved := report.checkpoint) is not None:
        what = "Seconds since the newest checkpoint of this execution was committed."
        yield _Family("checkpoint_age_seconds", "gauge", what, [("", saved.seconds)])
        yield _Family("checkpoint_step", "gauge", "Step of that checkpoint.", [("", saved.step)])


def _of_ranks(report: PodReport) -> Iterator[_Family]:
    ranks = [(f'{{rank="{rank.rank}"}}', rank) for rank in report.ranks]
    steps = [(labels, rank.step) for labels, rank in ranks]
    yield _Family("rank_step", "gauge", "Training steps that a rank has done, from the job's start.", steps)
    busy = [(labels, rank.busy_seconds) for labels, rank in ranks if rank.busy_seconds is not None]
    yield _Family("rank_busy_seconds", "gauge", "Seconds that a step takes a rank outside of waits for others.", busy)
    what = "Seconds since a rank began what it does: one that stands still shows more and more."
    yield _Family("rank_activity_seconds", "gauge", what, [(labels, rank.seconds) for labels, rank in ranks])

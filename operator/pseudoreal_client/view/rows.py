"""Output of `pseudoreal get`: one line per job. Pure."""

from collections.abc import Sequence
from datetime import datetime

from pseudoreal_client.text import NOTHING, age, columns, duration, number
from pseudoreal_client.view.seen import SeenJob

_HEADS = ("NAME", "STATE", "PHASE", "STEP", "PROGRESS", "LOSS", "REMAINING", "RESTARTS", "AGE")
_WIDE = ("READY", "VAL-LOSS", "TOKENS/S", "CHECKPOINT", "SAVED", "REASON")


def table(jobs: Sequence[SeenJob], now: datetime, *, wide: bool, namespaces: bool) -> list[str]:
    """Return the lines of the table. `namespaces`: the first column is the job's namespace."""
    heads = (*(("NAMESPACE",) if namespaces else ()), *_HEADS, *(_WIDE if wide else ()))
    return columns([heads, *(_row(job, now, wide=wide, namespaces=namespaces) for job in jobs)])


def _row(job: SeenJob, now: datetime, *, wide: bool, namespaces: bool) -> list[str]:
    status, progress, left = job.status, job.status.progress, job.remaining_of_job(now)
    row = [job.namespace] if namespaces else []
    row += [job.name, status.state, status.current_phase or NOTHING]
    row += [number(progress.step), _percent(progress.percent), progress.loss or NOTHING] if progress else [NOTHING] * 3
    row += [NOTHING if left is None else duration(left), str(status.restarts), age(job.created, now)]
    return [*row, *_wide(job, now)] if wide else row


def _wide(job: SeenJob, now: datetime) -> list[str]:
    status, progress, saved = job.status, job.status.progress, job.status.checkpoint
    cells = [f"{status.replicas.ready}/{status.replicas.desired}"]
    cells += [progress.validation_loss or NOTHING, progress.tokens_per_second or NOTHING] if progress else [NOTHING] * 2
    cells += [saved.latest, age(saved.saved_time, now)] if saved else [NOTHING] * 2
    return [*cells, job.reason.reason if job.reason else NOTHING]


def _percent(value: int | None) -> str:
    return NOTHING if value is None else f"{value}%"

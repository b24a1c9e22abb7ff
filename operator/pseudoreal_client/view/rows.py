"""One line per job: the rows of `pseudoreal get`, and the line of `watch` if the output is not a terminal. Pure."""

from collections.abc import Sequence
from datetime import datetime

from pseudoreal.observed_job import ObservedJob, one_line, share

from pseudoreal_client.text import NOTHING, age, columns, duration, number

_HEADS = ("NAME", "STATE", "PHASE", "STEP", "PROGRESS", "LOSS", "REMAINING", "RESTARTS", "AGE")
_WIDE = ("READY", "VAL-LOSS", "TOKENS/S", "CHECKPOINT", "SAVED", "REASON")


def table(jobs: Sequence[ObservedJob], now: datetime, *, wide: bool, namespaces: bool) -> list[str]:
    """Return the lines of the table. `namespaces`: whether the first column is the job's namespace."""
    heads = (*(("NAMESPACE",) if namespaces else ()), *_HEADS, *(_WIDE if wide else ()))
    return columns([heads, *(_row(job, now, wide=wide, namespaces=namespaces) for job in jobs)])


def _row(job: ObservedJob, now: datetime, *, wide: bool, namespaces: bool) -> list[str]:
    status, progress, left = job.status, job.status.progress, job.remaining_of_job(now)
    row = [job.namespace] if namespaces else []
    row += [job.name, status.state, status.current_phase or NOTHING]
    row += [number(progress.step), _percent(progress.percent), progress.loss or NOTHING] if progress else [NOTHING] * 3
    row += [NOTHING if left is None else duration(left), str(status.restarts), age(job.created, now)]
    return [*row, *_wide(job, now)] if wide else row


def _wide(job: ObservedJob, now: datetime) -> list[str]:
    status, progress, saved = job.status, job.status.progress, job.status.checkpoint
    cells = [f"{status.replicas.ready}/{status.replicas.desired}"]
    cells += [progress.validation_loss or NOTHING, progress.tokens_per_second or NOTHING] if progress else [NOTHING] * 2
    cells += [saved.latest, age(saved.saved_time, now)] if saved else [NOTHING] * 2
    return [*cells, job.reason.reason if job.reason else NOTHING]


def _percent(value: int | None) -> str:
    return NOTHING if value is None else f"{value}%"


def summary_line(job: ObservedJob, now: datetime) -> str:
    """Return one line on a job: state and phase, then step, loss and remaining time, or else the condition's
    message."""
    status, progress = job.status, job.status.progress
    parts = [status.state, f"phase {status.current_phase}" if status.current_phase else ""]
    if progress and not job.is_over:
        left = job.remaining_of_job(now)
        parts += [f"step {share(progress)}", f"loss {progress.loss}" if progress.loss else ""]
        parts += [f"{duration(left)} left"] if left is not None and status.state == "Training" else []
    elif job.reason:
        parts.append(one_line(job.reason.message))
    return "  ".join(filter(None, parts))

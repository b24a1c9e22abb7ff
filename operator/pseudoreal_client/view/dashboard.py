"""Screen of `pseudoreal watch` for one job. Pure: returns the elements to draw."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise

from pseudoreal.observed_job import ObservedJob, one_line
from pseudoreal_api.quantity import readable_bytes
from pseudoreal_api.resolved.resolve import last_steps
from pseudoreal_operator.observe.view import Pod
from pseudoreal_trainer.cli.curve import plot
from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from pseudoreal_client.text import NOTHING, age, columns, duration
from pseudoreal_client.view.description import phase_table
from pseudoreal_client.view.history import History
from pseudoreal_client.view.ranks import rank_map

_CURVE_LINES = 8
_CHECKPOINTS = 3
_BAR = 30
_OTHER_LINES = 26
"""Number of lines of the screen besides the lines of phases and pods."""
_LEAST_PODS = 4
_COLOURS = {"Training": "green", "Complete": "green", "Failed": "red", "Restarting": "yellow", "Suspended": "yellow"}


@dataclass(frozen=True)
class Snapshot:
    """State of a job at one moment. `notes` are sentences about unreadable parts."""

    job: ObservedJob
    pods: Sequence[Pod]
    history: History
    notes: Sequence[str]
    now: datetime


def dashboard(snapshot: Snapshot, width: int, height: int) -> RenderableType:
    """Return the screen for a terminal of `width` x `height` characters."""
    parts: list[RenderableType] = [_title(snapshot), *_reason(snapshot), *_bars(snapshot)]
    parts += _part("Phases", phase_table(snapshot.job, snapshot.now))
    parts += _part(_loss(snapshot), plot(snapshot.history.losses, width - 2, _CURVE_LINES, _ends(snapshot.job)))
    room = max(_LEAST_PODS, height - _OTHER_LINES - len(snapshot.job.phase_names))
    parts += _part("Ranks", rank_map(snapshot.job, snapshot.pods, snapshot.now, room))
    parts += _part("Checkpoints", _checkpoints(snapshot))
    parts += [Text(note, style="yellow", overflow="ellipsis", no_wrap=True) for note in snapshot.notes]
    return Group(*parts)


def _title(snapshot: Snapshot) -> Text:
    job, status = snapshot.job, snapshot.job.status
    where = f"  phase {status.current_phase}" if status.current_phase else ""
    title = Text(f"{job.namespace}/{job.name}  ", style="bold", overflow="ellipsis", no_wrap=True)
    title.append(status.state, style=_COLOURS.get(status.state, "cyan"))
    restarts = f"  restarts {status.restarts}" if status.restarts else ""
    title.append(
        f"{where}  execution {status.execution}{restarts}  age {age(job.created, snapshot.now)}", style="default"
    )
    return title


def _reason(snapshot: Snapshot) -> list[RenderableType]:
    message = one_line(snapshot.job.reason.message) if snapshot.job.reason else ""
    return [Text(message, overflow="ellipsis", no_wrap=True)] if message else []


def _bars(snapshot: Snapshot) -> list[RenderableType]:
    """Return progress bars of the phase and the job, with the remaining time of each."""
    job, progress = snapshot.job, snapshot.job.status.progress
    if progress is None or job.spec is None:
        return []
    table = Table.grid(padding=(0, 2))
    rate = f"{progress.tokens_per_second} tokens/s" if progress.tokens_per_second else ""
    for name, (begin, end), left in _spans(snapshot):
        done = min(max(progress.step - begin, 0), end - begin)
        bar = ProgressBar(total=max(1, end - begin), completed=done, width=_BAR)
        steps = f"{done:,} of {end - begin:,} steps"
        table.add_row(name, bar, steps, f"{duration(left)} left" if left is not None else NOTHING, rate)
        rate = ""
    return [table]


def _spans(snapshot: Snapshot) -> Iterator[tuple[str, tuple[int, int], float | None]]:
    """Yield name, (start step, end step) and remaining seconds (None: unknown), of the current phase and then of the
    job."""
    job, name = snapshot.job, snapshot.job.status.current_phase
    assert job.spec is not None, "`_bars` returns early if the spec is unreadable"
    ends = last_steps(job.spec)
    spans = dict(zip(job.phase_names, pairwise([0, *ends]), strict=True))
    if name in spans:
        # The previous phase may have ended before its last step.
        before = job.status.phases[job.phase_names.index(name) - 1] if name != job.phase_names[0] else None
        begin = before.step if before and before.step is not None else spans[name][0]
        yield f"phase {name}", (begin, spans[name][1]), job.remaining_of_phase(snapshot.now)
    yield "job", (0, ends[-1]), job.remaining_of_job(snapshot.now)


def _loss(snapshot: Snapshot) -> str:
    progress = snapshot.job.status.progress
    if progress is None:
        return "Loss"
    return f"Loss {progress.loss or NOTHING}, of the validation text {progress.validation_loss or NOTHING}"


def _ends(job: ObservedJob) -> list[int]:
    return [phase.step for phase in job.status.phases if phase.step is not None]


def _checkpoints(snapshot: Snapshot) -> list[str]:
    """Return the checkpoint in the status, then the newest checkpoints in the logs, each with its cost."""
    rows = [
        (f"step {cost.step:,}", readable_bytes(cost.bytes), f"saved in {duration(cost.seconds)}")
        for cost in [*snapshot.history.checkpoints.values()][-_CHECKPOINTS:]
    ]
    saved = snapshot.job.status.checkpoint
    newest = [(saved.latest, f"step {saved.step:,}", f"{age(saved.saved_time, snapshot.now)} ago")] if saved else []
    return columns(newest + rows)


def _part(title: str, lines: Sequence[str]) -> list[RenderableType]:
    if not lines:
        return []
    body = Text("\n".join(f"  {line}" for line in lines), overflow="ellipsis", no_wrap=True)
    return [Text(""), Text(title, style="bold"), body]

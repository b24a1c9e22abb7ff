"""Output of `pseudoreal run`: a progress bar and a curve of the loss on a terminal, plain lines elsewhere, a table at
the end."""

import time
from types import TracebackType
from typing import Any, Self

from pseudoreal_api.wire import messages
from pseudoreal_api.wire.messages import ProgressReport
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

from pseudoreal_trainer.cli.curve import plot
from pseudoreal_trainer.cli.local_run import Event
from pseudoreal_trainer.cli.run_directory import RunDirectory

_LINE_SECONDS = 5.0
_CURVE_WIDTH, _CURVE_HEIGHT = 100, 10
"""Largest width of the curve, and its height, in characters."""
_MOST_LOSSES = 2000
"""Number of losses from which every second one is forgotten: each refresh of the curve reads all of them."""


class Display:
    """Display of the log events of a run's pods. A context manager."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.seconds: dict[str, float] = {}
        """Phase name -> seconds of training, for the phases trained in this run."""
        self.baseline: float | None = None
        """Loss of the order-2 model, in nats per byte; None for token files, and before the corpus is logged."""
        self.sample: Event | None = None
        self._task: TaskID | None = None
        self._line_at = 0.0
        self._losses: dict[int, float] = {}
        """Step -> loss, for the progress reports of this run; thinned out evenly in a long run."""
        self._ends: list[int] = []
        """Last steps of the phases that ended in this run."""
        self._bar = Progress(
            TextColumn("{task.fields[phase]:>10}"),
            BarColumn(),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TextColumn("{task.fields[facts]}"),
            console=console,
        )
        self._live = Live(get_renderable=self._draw, console=console)

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._live.stop()

    def _draw(self) -> Group:
        width = min(_CURVE_WIDTH, self.console.width - 1)
        # Copied at once: the live view draws in a thread of its own while reports come in.
        losses, ends = self._losses.copy(), self._ends.copy()
        curve = plot(losses, width, _CURVE_HEIGHT, ends) if len(losses) > 1 else []
        # The bar first: a terminal too low for all lines cuts off the last of them.
        return Group(self._bar, *(Text(line, no_wrap=True) for line in curve))

    def show(self, event: Event) -> None:
        match event.get("event"):
            case messages.PROGRESS_EVENT:
                self._progress(ProgressReport.model_validate(event))
            case "corpus":
                self.baseline = event["order2_nats"]
                self._print(f"corpus: {event['bytes']:,} bytes; order-2 model: {self.baseline:.4f} nats per byte")
            case "token_corpus":
                self._print(f"corpus: {event['tokens']:,} tokens in {len(event['sources'])} sources")
            case "phase_started":
                self._line_at = 0.0
                self._print(_phase_text(event))
            case "phase_finished":
                self.seconds[event["phase"]] = event["seconds"]
                self._ends.append(event["step"])
                self._print(f"phase {event['phase']} finished at step {event['step']}")
            case "sample":
                self.sample = event
            case "delinked":
                self._print(f"delinked into {_blocks_text(event)}: {event['checkpoint']} from {event['parent']}")
            case "grown":
                self._print(f"{_growth_text(event)}: {event['checkpoint']} from {event['parent']}")
            case _ if event.get("level") in ("warning", "error"):
                self._print(" ".join(f"{key}={event[key]}" for key in event if key not in ("timestamp", "exception")))

    def _print(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def _progress(self, report: ProgressReport) -> None:
        if self.console.is_terminal:
            self._move_bar(report)
            return
        now = time.monotonic()
        is_last = report.remaining_seconds == 0
        if now - self._line_at >= _LINE_SECONDS or is_last:
            self._line_at = now
            self._print(f"{report.phase}  step {report.step}/{report.total_steps}  {_figures(report)}")

    def _move_bar(self, report: ProgressReport) -> None:
        if self._task is None:
            self._task = self._bar.add_task("", total=report.total_steps, phase="", facts="")
        if report.loss is not None:
            self._losses[report.step] = report.loss
        if len(self._losses) > _MOST_LOSSES:
            self._losses = dict(list(self._losses.items())[::2])
        self._bar.update(self._task, completed=report.step, phase=report.phase, facts=_figures(report))


def _phase_text(event: Event) -> str:
    where = f"{event['ranks']} rank{'s' if event['ranks'] > 1 else ''} on {event['device']}"
    since = f", resumed from {event['resumed_from']}" if event["resumed_from"] else ""
    return (
        f"phase {event['phase']}: steps {event['step']}..{event['phase_steps']}, {event['layers']} layers of"
        f" {_blocks_text(event)}, {event['parameters']:,} parameters, {where}{since}"
    )


def _growth_text(event: Event) -> str:
    parts = []
    if event["layers_before"] < event["layers"]:
        parts.append(f"from {event['layers_before']} to {event['layers']} layers ({event['pattern']})")
    if event["experts_before"] < event["experts"]:
        parts.append(f"from {event['experts_before']} to {event['experts']} experts")
    return f"grown {' and '.join(parts)}, {_blocks_text(event)}"


def _blocks_text(event: Event) -> str:
    """Return a phrase with the number of blocks, and the number of sets of experts if the model has experts."""
    sets = event["sets_of_experts"]
    experts = f" and {sets} set{'s' if sets > 1 else ''} of experts" if sets else ""
    return f"{event['blocks']} blocks{experts}"


def _figures(report: ProgressReport) -> str:
    seconds = round(report.remaining_seconds)
    return (
        f"loss {_number(report.loss)}  val {_number(report.validation_loss)}  {report.tokens_per_second:,.0f} tok/s"
        f"  ETA {seconds // 60}:{seconds % 60:02d}"
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def summary(directory: RunDirectory, seconds: dict[str, float]) -> Table:
    """Return the table of all finished phases. `seconds`: phase name -> seconds of training, for the phases trained in
    this run."""
    table = Table("phase", "steps", "loss", "start val", "end val", "seconds")
    done = 0
    for index, phase in enumerate(directory.job.spec.phases):
        manifest = directory.final_checkpoint(index)
        if manifest is None:
            continue
        losses = (manifest.loss, manifest.start_validation_loss, manifest.validation_loss)
        spent = f"{seconds[phase.name]:.1f}" if phase.name in seconds else "-"
        row: list[Any] = [phase.name, str(manifest.step - done), *map(_number, losses), spent]
        table.add_row(*row)
        done = manifest.step
    return table

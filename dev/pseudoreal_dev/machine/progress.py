"""Shows the current step and its duration, and records all steps for a final table."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

HEARTBEAT_SECONDS = 15.0


class Cost(Enum):
    """When a step costs time: only in the first run, because its result stays in the cache, or in every run."""

    FIRST_RUN = "first run"
    EVERY_RUN = "every run"


@dataclass(frozen=True)
class Timing:
    """One finished step. `depth`: number of enclosing steps."""

    name: str
    seconds: float
    depth: int
    cost: Cost


@dataclass(frozen=True)
class _Step:
    name: str
    started: float
    log: Path | None


class Progress:
    """Display of nested steps on one console: a live line on a terminal, plain lines with a heartbeat elsewhere."""

    def __init__(
        self,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
        heartbeat_seconds: float = HEARTBEAT_SECONDS,
    ) -> None:
        self.console = console or Console(highlight=False, soft_wrap=True)
        self._timings: list[Timing | None] = []
        self._clock = clock
        self._heartbeat_seconds = heartbeat_seconds
        self._started = clock()
        self._running: list[_Step] = []

    @contextmanager
    def step(
        self, name: str, *, cost: Cost = Cost.EVERY_RUN, log: Path | None = None, shows_itself: bool = False
    ) -> Iterator[None]:
        """Show `name` and the last line of `log` while the context runs, and record the duration of the context.

        With `shows_itself`, only record the duration: the context displays its own progress.
        """
        step = _Step(name, self._clock(), log)
        self._running.append(step)
        # Reserve the place now, so that a step comes before its inner steps.
        place = len(self._timings)
        self._timings.append(None)
        try:
            with nullcontext() if shows_itself else self._shown():
                yield
        except BaseException:
            self._print(f"{name}: stopped after {self._clock() - step.started:.1f}s")
            raise
        finally:
            self._running.remove(step)
        self._timings[place] = self._finish(step, cost)

    def note(self, text: str) -> None:
        """Print one permanent line, with the seconds since the start of the display."""
        self._print(text)

    def say(self, text: str) -> None:
        """Print a text without the seconds in front."""
        self.console.print(text, markup=False)

    @property
    def timings(self) -> list[Timing]:
        """Finished steps, in the order of their starts."""
        return [timing for timing in self._timings if timing]

    def table(self, title: str = "Where the time went") -> Table:
        """Return a table of the recorded steps with their seconds and costs."""
        table = Table("step", "seconds", "paid by", title=title)
        for timing in self.timings:
            table.add_row("  " * timing.depth + escape(timing.name), f"{timing.seconds:.1f}", timing.cost.value)
        return table

    def _finish(self, step: _Step, cost: Cost) -> Timing:
        timing = Timing(step.name, self._clock() - step.started, len(self._running), cost)
        self._print(f"{'  ' * timing.depth}{step.name}: done in {timing.seconds:.1f}s")
        return timing

    @contextmanager
    def _shown(self) -> Iterator[None]:
        if len(self._running) > 1:  # the outermost step's display already shows the innermost one
            if not self.console.is_terminal:
                self._print(f"{self._indent()}{self._running[-1].name} ...")
            yield
        elif self.console.is_terminal:
            with Live(get_renderable=self._line, console=self.console, transient=True, refresh_per_second=4):
                yield
        else:
            self._print(f"{self._running[-1].name} ...")
            with self._heart():
                yield

    @contextmanager
    def _heart(self) -> Iterator[None]:
        stopped = threading.Event()
        thread = threading.Thread(target=self._beat, args=(stopped,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            stopped.set()
            thread.join()

    def _beat(self, stopped: threading.Event) -> None:
        while not stopped.wait(self._heartbeat_seconds):
            self._print(self._indent() + self._describe())

    def _describe(self) -> str:
        if not self._running:
            return ""
        step = self._running[-1]
        tail = last_line(step.log) if step.log else ""
        return f"{step.name} ... {self._clock() - step.started:.0f}s" + (f"  {tail}" if tail else "")

    def _line(self) -> Text:
        return Text(f"  {self._describe()}"[: self.console.width], style="cyan", no_wrap=True)

    def _indent(self) -> str:
        return "  " * (len(self._running) - 1)

    def _print(self, text: str) -> None:
        self.console.print(f"[{self._clock() - self._started:6.1f}s] {text}", markup=False)


def totals(timings: Sequence[Timing]) -> dict[Cost, float]:
    """Return the seconds of each kind of cost; their sum is the duration of all outermost steps.

    `timings` are in the order of their starts. The time of steps inside a first-run step counts as first run.
    """
    first_run = 0.0
    covered_below: int | None = None  # depth of the enclosing first-run step
    for timing in timings:
        if covered_below is not None and timing.depth > covered_below:
            continue
        covered_below = timing.depth if timing.cost is Cost.FIRST_RUN else None
        first_run += timing.seconds if timing.cost is Cost.FIRST_RUN else 0.0
    outermost = sum(timing.seconds for timing in timings if timing.depth == 0)
    return {Cost.FIRST_RUN: first_run, Cost.EVERY_RUN: outermost - first_run}


def last_line(log: Path) -> str:
    """Return the last non-empty line of a file; "" if there is none."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 4096))
            lines = [line for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    except FileNotFoundError:
        return ""
    return lines[-1].strip()[:120] if lines else ""


progress = Progress()
"""Display of this process, shared by all parts of the tooling."""

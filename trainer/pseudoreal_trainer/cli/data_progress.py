"""Progress of the commands of `pseudoreal data`: a bar on a terminal, occasional lines elsewhere."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from pseudoreal_api.quantity import readable_bytes
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column

from pseudoreal_trainer.data.prepare.workers import Totals

_LINE_SECONDS = 10.0


class PrepareDisplay:
    """Progress display of `pseudoreal data prepare`. A context manager."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console, self._clock = console, clock
        self._begun = self._line_at = clock()
        self._bar = Progress(
            BarColumn(bar_width=None),
            DownloadColumn(binary_units=True, table_column=Column(no_wrap=True)),
            TextColumn("{task.fields[rates]}", table_column=Column(no_wrap=True)),
            TimeRemainingColumn(table_column=Column(no_wrap=True)),
            expand=True,
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=None, rates="finding the inputs")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._bar.stop()

    def tick(self, totals: Totals, size: int) -> None:
        """Show the totals so far. `size` is the size of all inputs in bytes."""
        seconds = max(self._clock() - self._begun, 1e-9)
        rates = f"{totals.text_bytes / seconds / 1e6:.2f} MB/s, {totals.tokens / seconds:,.0f} tokens/s"
        self._bar.update(self._task, completed=totals.read_bytes, total=size, rates=rates)
        if not self._console.is_terminal and self._clock() - self._line_at >= _LINE_SECONDS:
            self._line_at = self._clock()
            self._print_line(totals, size, rates)

    def _print_line(self, totals: Totals, size: int, rates: str) -> None:
        malformed = f", {totals.malformed:,} malformed" if totals.malformed else ""
        self._console.print(
            f"preparing: {readable_bytes(totals.read_bytes)} of {readable_bytes(size)} read, {rates},"
            f" {totals.documents:,} documents, {totals.tokens:,} tokens{malformed}",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )


@contextmanager
def sampling_progress(console: Console, size: int) -> Iterator[Callable[[int], None]]:
    """Show how much of the sample is read, then that merges are learned. Yields a function to call with the number of
    bytes read so far."""
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TimeElapsedColumn(),
        console=console, disable=not console.is_terminal, transient=True,
    )  # fmt: skip
    task = bar.add_task("reading", total=size)

    def tick(read: int) -> None:
        done = min(read, size)
        bar.update(task, completed=done, description="reading" if done < size else "learning merges")

    with bar:
        yield tick

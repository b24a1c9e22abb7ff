"""What the commands of `pseudoreal data` show while they work: a bar on a terminal, a line now and then elsewhere."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from pseudoreal_trainer.data.prepare.workers import Totals
from pseudoreal_trainer.quantity import readable_bytes

_LINE_SECONDS = 10.0


class PrepareDisplay:
    """Shows how far the preparation is. Use as a context manager."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console, self._clock = console, clock
        self._begun = self._line_at = clock()
        self._bar = Progress(
            TextColumn("preparing"),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TextColumn("{task.fields[facts]}"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=None, facts="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._bar.stop()

    def tick(self, totals: Totals, size: int) -> None:
        """`size`: bytes of all inputs."""
        facts = self._facts(totals)
        self._bar.update(self._task, completed=totals.read_bytes, total=size, facts=facts)
        if not self._console.is_terminal and self._clock() - self._line_at >= _LINE_SECONDS:
            self._line_at = self._clock()
            read = f"{readable_bytes(totals.read_bytes)} of {readable_bytes(size)} read"
            self._console.print(f"preparing: {read}, {facts}", highlight=False, markup=False, soft_wrap=True)

    def _facts(self, totals: Totals) -> str:
        seconds = max(self._clock() - self._begun, 1e-9)
        malformed = f", {totals.malformed:,} malformed" if totals.malformed else ""
        return (
            f"{totals.documents:,} documents, {totals.tokens:,} tokens, {totals.text_bytes / seconds / 1e6:.2f} MB/s,"
            f" {totals.tokens / seconds:,.0f} tokens/s{malformed}"
        )


@contextmanager
def sampling(console: Console, size: int) -> Iterator[Callable[[int], None]]:
    """Shows how much of the sample is read, and then that merges are learned. Gives what is to be told the bytes."""
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

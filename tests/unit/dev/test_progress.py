import io
import threading
from pathlib import Path

import pytest
from pseudoreal_dev.machine.progress import Cost, Progress, Timing, last_line, totals
from rich.console import Console


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Lines(io.StringIO):
    """Captures the printed text; sets `seen` once a line contains `awaited`."""

    def __init__(self, awaited: str = "") -> None:
        super().__init__()
        self._awaited = awaited
        self.seen = threading.Event()

    def write(self, text: str) -> int:
        if self._awaited and self._awaited in text:
            self.seen.set()
        return super().write(text)


def plain(clock: Clock, lines: Lines, heartbeat_seconds: float = 60.0) -> Progress:
    console = Console(file=lines, force_terminal=False, width=200)
    return Progress(console, clock, heartbeat_seconds)


def test_durations_and_nesting_are_recorded_in_the_order_of_the_starts() -> None:
    clock = Clock()
    progress = plain(clock, Lines())
    with progress.step("outer", cost=Cost.FIRST_RUN):
        clock.now += 1
        with progress.step("inner"):
            clock.now += 2.5
        clock.now += 4
    recorded = [(timing.name, timing.seconds, timing.depth, timing.cost) for timing in progress.timings]
    assert recorded == [("outer", 7.5, 0, Cost.FIRST_RUN), ("inner", 2.5, 1, Cost.EVERY_RUN)]


def test_a_failed_step_is_shown_and_not_recorded() -> None:
    lines = Lines()
    progress = plain(Clock(), lines)
    with pytest.raises(KeyError), progress.step("building"):
        raise KeyError
    assert progress.timings == []
    assert "building: stopped" in lines.getvalue()


def test_without_a_terminal_a_long_step_gives_signs_of_life_with_the_logs_last_line(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("compiling a\ncompiling b\n\n")
    lines = Lines(awaited="compiling b")
    with plain(Clock(), lines, heartbeat_seconds=0.01).step("building", log=log):
        assert lines.seen.wait(timeout=30)


def test_the_table_marks_what_only_a_first_run_pays_for() -> None:
    lines = Lines()
    progress = plain(Clock(), lines)
    with progress.step("compiling", cost=Cost.FIRST_RUN):
        pass
    progress.console.print(progress.table())
    row = next(line for line in lines.getvalue().splitlines() if "compiling" in line and "first run" in line)
    assert "0.0" in row


def test_the_last_line_of_a_log_that_is_not_there_is_empty(tmp_path: Path) -> None:
    assert last_line(tmp_path / "none") == ""


def test_totals_count_no_second_twice() -> None:
    first, every = Cost.FIRST_RUN, Cost.EVERY_RUN
    timings = [
        Timing("programs", 10.0, 0, first),
        Timing("kubelet", 6.0, 1, first),
        Timing("demo", 20.0, 0, every),
        Timing("image", 5.0, 1, first),
        Timing("export", 4.0, 2, first),
        Timing("training", 15.0, 1, every),
    ]
    assert totals(timings) == {first: 15.0, every: 15.0}

"""Output of `watch`: the loss curve, the history read from logs, and the whole screen compared with reviewed files."""

import io
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pseudoreal.observed_job import ObservedJob
from pseudoreal_client.view.dashboard import Snapshot, dashboard
from pseudoreal_client.view.history import History
from pseudoreal_trainer.cli.curve import plot
from rich.console import Console

from tests.support.trainer_log import line
from tests.unit.client.support.golden import golden
from tests.unit.client.support.observed_jobs import NOW, TRAINING, UNSCHEDULABLE, at, job, pod

Json = dict[str, Any]


def history(*lines: str) -> History:
    made = History()
    made.read(lines)
    return made


def dots(rows: list[str]) -> set[tuple[int, int]]:
    """Return row and column of each dot of the curve, by the Unicode block "Braille Patterns": bits count down the left
    column, then down the right one; the last row comes last."""
    places = [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1), (3, 0), (3, 1)]
    return {
        (4 * y + row, 2 * x + column)
        for y, text in enumerate(rows)
        for x, char in enumerate(text)
        for bit, (row, column) in enumerate(places)
        if 0x2800 <= ord(char) < 0x2900 and (ord(char) - 0x2800) >> bit & 1
    }


class TestCurve:
    def test_a_straight_line_is_drawn_as_a_diagonal(self) -> None:
        *rows, axis = plot({step: float(-step) for step in range(8)}, width=4 + 4, height=2)
        assert dots([row.partition("┤")[2] for row in rows]) == {(n, n) for n in range(8)}
        assert [row.partition(" ┤")[0] for row in rows] == [" 0", "-7"]
        assert axis == "    step 0 7"

    def test_a_column_shows_the_mean_of_its_losses(self) -> None:
        losses = {0: 4.0, 1: 0.0, 2: 2.0, 100: 2.0}
        *rows, _ = plot(losses, width=1 + 2 + 2, height=1)
        # The first column of dots has three steps with the mean 2; the last column has one step.
        assert dots([row.partition("┤")[2] for row in rows]) == {(2, 0), (2, 3)}

    def test_ends_of_phases_are_marked(self) -> None:
        *rows, _ = plot({0: 1.0, 20: 0.0}, width=24, height=3, ends=[0, 10, 20])
        assert [row.index("┊") for row in rows] == [3 + 10] * 3

    @pytest.mark.parametrize("losses", [{5: 1.5}, {5: 1.5, 6: 1.5}])
    def test_equal_losses_are_drawn(self, losses: dict[int, float]) -> None:
        *rows, _ = plot(losses, width=20, height=4)
        assert len(dots(rows)) == len(losses)

    def test_no_losses_draw_nothing(self) -> None:
        assert plot({}, 20, 5) == []

    @given(
        st.dictionaries(st.integers(0, 10**9), st.floats(-1e6, 1e6), min_size=1, max_size=50),
        st.integers(1, 100),
        st.integers(1, 10),
    )
    def test_curve_stays_within_width_and_height(self, losses: dict[int, float], width: int, height: int) -> None:
        *rows, _ = plot(losses, width, height, ends=[*losses])
        assert len(rows) == height
        margin = max(len(row.partition("┤")[0]) for row in rows)
        assert all(len(row) <= max(width, margin + 2) for row in rows)
        assert dots(rows)


class TestHistory:
    def test_logs_give_losses_and_checkpoints(self) -> None:
        read = history("torch is loaded", line(1, 5.0), "{", '{"event": "other"}', line(2, None), line(3, 4.0, 3))
        assert read.losses == {1: 5.0, 3: 4.0}
        assert [cost.bytes for cost in read.checkpoints.values()] == [2**31]

    def test_steps_trained_again_replace_the_earlier_ones(self) -> None:
        """A new execution resumes from step 2; its steps replace those of the failed execution."""
        read = history(line(1, 5.0), line(2, 4.0, 2), line(3, 3.0), line(4, 2.0, 4), line(3, 3.5))
        assert read.losses == {1: 5.0, 2: 4.0, 3: 3.5}
        assert [*read.checkpoints] == [2]

    def test_lines_read_twice_count_once(self) -> None:
        lines = [line(step, 10.0 - step) for step in range(1, 8)]
        read = history(*lines, *lines[3:])
        assert read == history(*lines)

    def test_infinite_losses_are_left_out(self) -> None:
        assert history(line(1, 1.0).replace('"loss": 1.0', '"loss": NaN')).losses == {}

    def test_status_gives_losses_of_phases_without_logs(self) -> None:
        read = history(line(12, 4.0))
        read.add_status(job(TRAINING).status)
        assert [*read.losses.items()] == [(10, 4.25), (12, 4.0), (15, 3.25)]
        read.read([line(14, 3.5)])
        assert [*read.losses] == [10, 12, 14]


def screen(
    seen: ObservedJob, pods: list[Json], *lines: str, notes: tuple[str, ...] = (), size: tuple[int, int] = (100, 40)
) -> list[str]:
    read = history(*lines)
    read.add_status(seen.status)
    look = Snapshot(seen, seen.current_pods(pods), read, notes, NOW)
    console = Console(width=size[0], height=size[1], file=io.StringIO(), force_terminal=False)
    console.print(dashboard(look, *size))
    assert isinstance(console.file, io.StringIO)
    return [row.rstrip() for row in console.file.getvalue().splitlines()]


LINES = [line(step, 5.5 - step / 8, step if step % 5 == 0 else None) for step in range(1, 15)]
SCREENS: dict[str, list[str]] = {
    "training": screen(job(TRAINING, spec__phases__1__processesPerWorker=2), [pod(0), pod(1)], *LINES),
    "fresh": screen(job(), []),
    "pending": screen(
        job({"state": "Pending", "currentPhase": "pseudo", "execution": 1}),
        [pod(0, phase="pseudo", node="", status=UNSCHEDULABLE)],
        notes=("the cluster does not answer",),
    ),
    "failed": screen(job(TRAINING | {"state": "Failed", "completionTime": at(1), "currentPhase": None}), []),
}


@pytest.mark.parametrize("name", SCREENS)
def test_dashboard_matches_its_golden_file(name: str) -> None:
    assert "\n".join(SCREENS[name]) + "\n" == golden(f"watch-{name}", SCREENS[name])


@pytest.mark.parametrize("width", [40, 80, 200])
def test_dashboard_is_no_wider_than_the_terminal(width: int) -> None:
    seen = job(TRAINING, spec__phases__1__processesPerWorker=2)
    rows = screen(seen, [pod(0), pod(1)], *LINES, notes=("far " * 100,), size=(width, 40))
    assert max(map(len, rows)) <= width


def test_rank_map_of_many_pods_keeps_those_that_do_not_run() -> None:
    pods = [pod(index, status=UNSCHEDULABLE if index in (17, 400) else None) for index in range(1000)]
    rows = screen(job(TRAINING, spec__phases__1__workers=1000), pods, size=(100, 40))
    shown = "\n".join(rows)
    assert "llm-real-abcdef-e2-17 " in shown
    assert "llm-real-abcdef-e2-400" in shown
    assert "and 988 more pods, all of which run" in shown
    assert len(rows) <= 40


def test_progress_bar_starts_where_the_previous_phase_ended_early() -> None:
    early = [{**TRAINING["phases"][0], "step": 6}, TRAINING["phases"][1]]
    rows = screen(job(TRAINING | {"phases": early}), [])
    assert any("phase real" in row and "9 of 14 steps" in row for row in rows)

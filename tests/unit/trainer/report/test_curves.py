"""Steps of a job, and curves with few points."""

import json
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from pseudoreal_trainer.report.downsample import buckets, kept_points
from pseudoreal_trainer.report.figures import charts_of
from pseudoreal_trainer.report.steps import TRAINED_SECONDS, read_steps

from tests.unit.trainer.report.support.jobs import entry, job, line, started

VALUES = arrays(np.float64, st.integers(0, 300), elements=st.floats(-10, 10) | st.sampled_from([np.nan, np.inf]))


@given(VALUES, st.integers(4, 40))
def test_few_points_keep_first_last_lowest_and_highest(values: Any, most: int) -> None:
    kept = kept_points(values, most)
    finite = [index for index, value in enumerate(values) if np.isfinite(value)]
    assert len(kept) <= most
    assert all(before < after for before, after in pairwise(kept))
    assert set(kept) <= set(finite)
    if finite:
        assert (kept[0], kept[-1]) == (finite[0], finite[-1])
        assert max(values[kept]) == max(values[finite])
        assert min(values[kept]) == min(values[finite])


@pytest.mark.parametrize("spike", [1, 4321, 9998])
def test_a_spike_of_one_step_among_ten_thousand_stays_visible(spike: int) -> None:
    lines = [line(step, loss=99.0 if step == spike else 2.0) for step in range(1, 10_001)]
    loss = next(chart for chart in charts_of([job(lines)]) if chart.id == "loss")
    (drawn,) = loss.lines
    assert len(drawn.y) <= 4000
    assert dict(zip(drawn.x["step"], drawn.y, strict=True))[spike] == 99.0
    assert f"highest 99 at step {spike:,}" in drawn.summary
    assert [row.highest for row in drawn.rows if row.first <= spike <= row.last] == ["99"]


@given(VALUES.filter(lambda values: np.isfinite(values).any()), st.integers(1, 40))
def test_rows_of_a_table_cover_every_value_once(values: Any, most: int) -> None:
    found = list(buckets(values, most))
    finite = values[np.isfinite(values)]
    counts = [int(np.isfinite(values[each.first : each.last + 1]).sum()) for each in found]
    assert sum(counts) == len(finite)
    assert len(found) == min(most, len(finite))
    total = sum(each.mean * count for each, count in zip(found, counts, strict=True))
    assert total == pytest.approx(finite.sum(), abs=1e-9)


def test_seconds_and_waits_go_on_where_a_new_process_starts() -> None:
    """`seconds` and `waits` of a line count from the start of its process."""
    again = [line(step, seconds=step - 3.0, waits={"data": 0.5 * (step - 3)}) for step in (4, 5)]
    steps = read_steps([*map(line, (1, 2, 3)), *again])
    assert steps.column(TRAINED_SECONDS).tolist() == [1, 2, 3, 4, 5]
    assert steps.column("wait_data") == pytest.approx([0.1, 0.1, 0.1, 0.5, 0.5])
    assert steps.process_starts.tolist() == [0, 3]
    assert [restart.step for restart in job([*map(line, (1, 2, 3)), *again]).restarts] == [3]


def test_of_a_step_that_stands_twice_the_later_line_counts() -> None:
    steps = read_steps([line(1), line(2), line(3, loss=7.0), line(2, loss=8.0), line(3, loss=9.0)])
    assert steps.step.tolist() == [1, 2, 3]
    assert steps.column("loss").tolist() == [5.0, 8.0, 9.0]


@pytest.mark.parametrize(
    "bad",
    [
        b"",
        b"{",
        b"[]",
        b"\xff\xfe",
        b"null",
        b"[" * 100_000,
        b'{"phase": 3}',
        line(-1),
        line(2**53),
        line(1).replace(b'"step": 1', b'"step": 1' + b"0" * 400),
    ],
)
def test_a_line_that_makes_no_sense_is_counted_and_left_out(bad: bytes) -> None:
    steps = read_steps([line(1), bad, line(2)])
    assert (steps.step.tolist(), steps.unreadable) == ([1, 2], 1)


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999", "null"])
def test_a_number_that_cannot_be_drawn_is_a_gap(value: str) -> None:
    broken = line(2).replace(b'"loss": 2.5', f'"loss": {value}'.encode())
    loss = next(chart for chart in charts_of([job([line(1), broken, line(3)])]) if chart.id == "loss")
    assert loss.lines[0].x["step"] == [1, 3]
    json.dumps(loss.lines[0].y, allow_nan=False)


def test_numbers_beyond_a_float_and_names_without_end_are_bounded() -> None:
    lines = [line(n, tokens=10**400, validation_losses={f"set{n}": 1.0, "a": 2.0}) for n in range(1, 40)]
    steps = read_steps([*lines, *(line(40 + n, phase=f"p{n}") for n in range(200))])
    assert not np.isfinite(steps.column("tokens")[:39]).any()
    assert len(steps.validation_sets()) <= 12
    assert len(steps.phases) == 100
    assert steps.unreadable == 101


def test_charts_show_phases_delinks_and_restarts_on_every_axis(config: Any) -> None:
    lines = [*(line(step) for step in range(1, 7)), *(line(step, "real", seconds=step - 6.0) for step in range(7, 13))]
    history = [
        *(started(config(0), 0), entry("Ended", 6, outcome="Succeeded")),
        *(started(config(1), 7, step=6), started(config(1), 20, step=8, execution=2)),
    ]
    charts = {chart.id: chart for chart in charts_of([job(lines, history=history)])}
    border, restart = charts["loss"].marks
    assert (border.kind, border.text) == ("delink", "phase real, delink from 1 to 4 blocks")
    assert border.x == {"step": 6, "tokens": 576, "seconds": 6.0}
    assert (restart.kind, restart.x) == ("restart", {"step": 8, "tokens": 768, "seconds": 8.0})
    assert {"gradient-norm", "learning-rate", "speed", "waits", "memory"} < charts.keys()
    assert not {"mfu", "expert-load"} & charts.keys(), "what has no figure has no chart"
    assert [each.label for each in charts["memory"].lines] == ["host, measured", "host, predicted"]


def test_memory_is_predicted_as_by_pseudoreal_plan(config: Any) -> None:
    from pseudoreal_trainer.estimate.report import plan_phase

    planned = plan_phase(config(0), "cpu", None, 1).report.ranks[0]
    found = job([line(1)], history=[started(config(0), 0)]).predicted["pseudo"]
    assert (found.device, found.host) == (planned.peak_device_bytes, planned.bytes.host)


def test_several_jobs_have_a_colour_each(config: Any) -> None:
    from pseudoreal_trainer.report.job import jobs_of
    from pseudoreal_trainer.report.reading import JobFiles

    wide = config(0).model_copy(update={"batch": config(0).batch.model_copy(update={"sequences": 12})})
    files = [
        JobFiles(f"runs/{name}/work", read_steps([line(1), line(2)]), history=[started(each, 0)])
        for name, each in (("a", config(0)), ("b", wide))
    ]
    jobs = jobs_of(files)
    assert [each.label for each in jobs] == ["tiny (a)", "tiny (b)"]
    waits = next(chart for chart in charts_of(jobs) if chart.id == "waits")
    looks = [(each.label, each.colour, each.dash) for each in waits.lines]
    assert looks[:2] == [("tiny (a): data", 0, 0), ("tiny (a): reductions", 0, 1)]
    assert {colour for label, colour, _ in looks if label.startswith("tiny (b)")} == {1}
    assert len(set(looks)) == 6

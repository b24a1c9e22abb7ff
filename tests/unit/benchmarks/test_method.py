"""The report on the method, for given results."""

import csv
from pathlib import Path

import pytest

from benchmarks.method import report
from benchmarks.method.experiments import EXPERIMENTS, SHARED, job
from benchmarks.method.lives import Life, PhaseLife, Point
from benchmarks.method.summary import Bump, Pace, bump, final_loss, first_at, points, spread


def _phase(name: str, first: int, steps: int, losses: dict[int, float]) -> PhaseLife:
    found = [Point(step=step, tokens=10 * step, loss=loss) for step, loss in losses.items()]
    return PhaseLife(
        name=name, first_step=first, steps=steps, seconds_per_step=1.0, peak_bytes=0, points=found, correlations={}
    )


def _life(real: dict[int, float] | None = None) -> Life:
    """Return a result with 20 pseudo steps and 10 real steps."""
    pseudo = _phase("pseudo", 1, 20, {0: 5.0, 10: 3.0, 20: 2.0})
    return Life(experiment="both", seed=0, phases=[pseudo, _phase("real", 21, 10, real or {20: 2.0, 25: 1.9, 30: 1.8})])


@pytest.mark.parametrize(("step", "seconds"), [(0, 0.0), (1, 0.5), (20, 10.0), (21, 13.0), (30, 40.0), (99, 40.0)])
def test_seconds_until_a_step_are_those_of_each_phase(step: int, seconds: float) -> None:
    pace = Pace({("both", "pseudo"): 0.5, ("both", "real"): 3.0})
    assert pace.at(_life(), step) == pytest.approx(seconds)


@pytest.mark.parametrize(("loss", "step"), [(9.0, 0), (3.0, 10), (2.5, 20), (2.0, 20), (1.9, 25), (1.79, None)])
def test_a_loss_is_reached_at_the_first_validation_that_has_it(loss: float, step: int | None) -> None:
    assert first_at(_life(), loss) == step


@pytest.mark.parametrize(
    ("real", "expected"),
    [
        ({20: 2.0, 25: 2.0, 30: 1.9}, Bump(0.0, 0)),
        ({20: 2.0, 25: 2.5, 30: 1.9}, Bump(0.5, 10)),
        ({20: 2.0, 22: 1.9, 24: 2.25, 26: 2.125, 28: 1.9}, Bump(0.25, 8)),
        ({20: 2.0, 25: 1.9, 30: 2.5}, Bump(0.5, None)),
    ],
)
def test_a_bump_is_as_high_and_as_long_as_the_loss_is_above_that_of_the_delink(
    real: dict[int, float], expected: Bump
) -> None:
    assert bump(_life(real)) == expected


def test_the_loss_at_the_delink_counts_once() -> None:
    assert [point.step for point in points(_life())] == [0, 10, 20, 25, 30]
    assert final_loss(_life()) == 1.8
    assert spread([1.0, 3.0]) == pytest.approx((2.0, 2**0.5))
    assert spread([1.0]) == (1.0, 0.0)


def test_what_is_shared_throughout_is_one_pseudo_phase() -> None:
    phases = job(SHARED, 0, "text").spec.phases
    assert [(phase.name, phase.sharing and phase.sharing.blocks, phase.until.step) for phase in phases] == [
        ("pseudo", 1, 400)
    ]
    assert {experiment.regime for experiment in EXPERIMENTS if experiment.shared} == {"equal", "offload"}
    assert len({experiment.name for experiment in EXPERIMENTS}) == len(EXPERIMENTS)


def test_every_validation_of_every_seed_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "DATA", tmp_path / "data" / "method.csv")
    lives = [_life(), _life().model_copy(update={"seed": 1})]
    report.write_points(lives, Pace({("both", "pseudo"): 0.5, ("both", "real"): 3.0}))
    with report.DATA.open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 10
    assert list(rows[-1].values()) == ["both", "1", "30", "300", "40.00", "1.80000"]
    assert list(rows[-1]) == ["experiment", "seed", "step", "tokens", "seconds", "validation_loss"]

"""The fit of the law, on losses that follow it."""

import random

import pytest

from benchmarks.method.analysis import trials
from benchmarks.method.law import Fit, Law, Point, best_moment, fitted, moments, points_of
from tests.unit.benchmarks.method.support.samples import curve

TRUE = Law(irreducible=1.8, capacity=0.6, alpha=0.35, data=0.5, beta=0.4, phi=0.46)
SIZES = {16: 36_864, 24: 82_944, 32: 147_456}


def points(law: Law = TRUE, seeds: int = 1, noise: float = 0.0, widths: tuple[int, ...] = (16, 24, 32)) -> list[Point]:
    """Return 1, 4 and 12 blocks at width 24 and unshared training at all widths, at three budgets."""
    chance, found = random.Random(1), []
    for width in widths:
        for uses in (1, 3, 12) if width == 24 else (1,):
            for fraction in (0.5, 0.75, 1):
                for seed in range(seeds):
                    size, tokens = SIZES[width] / uses, 20 * SIZES[width] * fraction
                    # Written out, so that it does not follow the code under test.
                    effective = uses**law.phi * size / 1e5
                    loss = (
                        law.irreducible + law.capacity * effective**-law.alpha + law.data * (tokens / 1e6) ** -law.beta
                    )
                    found.append(Point(width, seed, size, uses, tokens, loss + chance.gauss(0, noise)))
    return found


@pytest.mark.parametrize("phi", [0.0, 0.46, 1.0])
def test_losses_by_the_law_give_its_phi_back(phi: float) -> None:
    law = Law(1.8, 0.6, 0.35, 0.5, 0.4, phi)
    found = fitted(points(law), resamples=0)
    assert isinstance(found, Fit)
    assert found.law.phi == pytest.approx(phi, abs=0.005)
    assert found.law.irreducible == pytest.approx(1.8, abs=0.02)
    assert found.residual < 1e-4
    assert (found.low, found.high) == (None, None)


def test_losses_below_what_the_law_can_have_give_the_least_of_it() -> None:
    """The losses are those of a law with E = -0.5; E must not be negative."""
    found = fitted(points(Law(-0.5, 0.6, 0.35, 0.5, 0.4, 0.46)), resamples=0)
    assert isinstance(found, Fit)
    assert found.law.irreducible == 0
    assert found.law.capacity > 0
    assert found.residual < 0.02


def test_the_interval_covers_phi_and_is_not_a_point() -> None:
    found = fitted(points(seeds=3, noise=0.005), resamples=8)
    assert isinstance(found, Fit)
    assert found.low is not None
    assert found.high is not None
    assert found.low < found.law.phi < found.high
    assert found.low - 0.03 < 0.46 < found.high + 0.03
    assert found.points == 15


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ([], "it needs unshared training and an arm that shares"),
        ([p for p in points() if p.uses == 1], "it needs unshared training and an arm that shares"),
        (points(widths=(24,)), "cannot be told apart"),
        ([p for p in points() if p.tokens == 20 * SIZES[p.width]], "not 7 different trainings"),
    ],
)
def test_too_few_data_are_said_in_a_sentence(given: list[Point], sentence: str) -> None:
    found = fitted(given)
    assert isinstance(found, str)
    assert sentence in found


def test_points_are_those_of_the_dense_arms_that_share_throughout() -> None:
    losses = (3.2, 3.1, 3.0)
    names = ("unshared", "shared throughout", "4 blocks throughout", "delinked at 30 %", "small model")
    rows = [one for name in names for one in curve("dense", name, 0, losses, width=24)]
    found = points_of(trials([*rows, *curve("experts", "experts shared throughout", 0, losses)]))
    assert {(point.uses, point.parameters) for point in found} == {(1, 82_944), (3, 27_648), (12, 6_912)}
    assert len(found) == 9


def test_per_token_the_law_favours_no_pseudo_phase() -> None:
    assert best_moment(TRUE, 82_944, 12, 20 * 82_944, ratio=1) == 0


def test_dearer_real_steps_favour_a_later_delink() -> None:
    found = [best_moment(TRUE, 82_944, 12, 20 * 82_944, ratio) for ratio in (1, 2, 5, 20)]
    assert found == sorted(found)
    assert found[-1] > 0.5


def test_the_best_moment_saves_the_most_seconds_by_a_bisection_of_the_law() -> None:
    """Where does unshared training have the pseudo phase's loss? Bisected, not inverted."""
    size, tokens, ratio = 82_944, 20 * 82_944, 3.0

    def seconds(fraction: float) -> float:
        loss = TRUE.loss(size / 12, 12, fraction * tokens)
        low, high = 1.0, float(tokens)
        for _ in range(100):
            middle = (low + high) / 2
            low, high = (middle, high) if TRUE.loss(size, 1, middle) > loss else (low, middle)
        return fraction * tokens / ratio + tokens - low

    found = best_moment(TRUE, size, 12, tokens, ratio)
    assert 0.02 < found < 0.98
    assert seconds(found) <= min(seconds(found - 0.01), seconds(found + 0.01))


def test_measured_moments_are_those_of_one_block() -> None:
    losses = (3.2, 3.1, 3.0)
    names = ("unshared", "delinked at 10 %", "delinked at 30 %", "4 blocks, delinked at 30 %", "1, 4, 12 blocks")
    found = moments(trials([one for name in names for one in curve("dense", name, 0, losses)]), ratio=2)
    assert found == {0.0: 1.0, 0.1: pytest.approx(1 / 0.95), 0.3: pytest.approx(1 / 0.85)}

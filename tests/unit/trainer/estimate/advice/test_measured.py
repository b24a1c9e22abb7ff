"""Results of a trial's runs, with losses whose speed-ups follow by hand."""

from math import exp, log

import pytest
from pseudoreal_trainer.errors import InvalidJobError
from pseudoreal_trainer.estimate.advice.evidence import Stage
from pseudoreal_trainer.estimate.advice.measured import Run, trials_of

REAL = (Stage(until=1, layers=8, blocks=8),)
DELINKED = (Stage(until=0.3, layers=8, blocks=1), Stage(until=1, layers=8, blocks=8))
SLOPE = 0.5
FINAL = {1: 2.0, 2: 2.1}


def run(stages: tuple[Stage, ...], seed: int, loss: float, tokens: int = 800, rate: str = "8e-3") -> Run:
    return Run(f"{len(stages)}-{seed}-{tokens}-{rate}", stages, seed, rate, tokens, loss)


UNSHARED = [
    *(run(REAL, seed, loss) for seed, loss in FINAL.items()),
    *(run(REAL, seed, loss + SLOPE * log(2), tokens=400) for seed, loss in FINAL.items()),
]


def test_speed_up_follows_from_the_slope_of_unshared_training_seed_by_seed() -> None:
    """0.1 nats below is e^0.2 at a slope of 0.5 nats for e times the tokens, 0.05 above is e^-0.1; half the width of
    two values' interval is 12.7062 times half their distance."""
    (trial,) = trials_of([*UNSHARED, run(DELINKED, 1, 1.9), run(DELINKED, 2, 2.15)], "dense", 32, 1000)
    assert trial.speed_up_in_tokens.mean == pytest.approx((exp(0.2) + exp(-0.1)) / 2)
    half = 12.7062 * (exp(0.2) - exp(-0.1)) / 2
    assert trial.speed_up_in_tokens.low == pytest.approx((exp(0.2) + exp(-0.1)) / 2 - half)
    assert trial.speed_up_in_tokens.high == pytest.approx((exp(0.2) + exp(-0.1)) / 2 + half)
    assert trial.loss_difference.mean == pytest.approx(-0.025)
    assert (trial.arm, trial.seeds, trial.tokens, trial.parameters) == (
        "1 block to 30 %",
        2,
        800,
        1000,
    )


def test_arms_are_paired_by_the_seeds_that_both_have() -> None:
    (trial,) = trials_of([*UNSHARED, run(DELINKED, 2, 2.1), run(DELINKED, 3, 9.0)], "dense", 32, 1000)
    assert (trial.seeds, trial.speed_up_in_tokens.low) == (1, None)
    assert trial.speed_up_in_tokens.mean == pytest.approx(1)


def test_each_arm_is_judged_at_its_best_rate() -> None:
    worse = [run(DELINKED, seed, 3.0, rate="4e-3") for seed in FINAL]
    better = [run(DELINKED, seed, loss, rate="2e-2") for seed, loss in FINAL.items()]
    (trial,) = trials_of([*UNSHARED, *worse, *better], "dense", 32, 1000)
    assert trial.loss_difference.mean == pytest.approx(0)


@pytest.mark.parametrize(
    ("runs", "words"),
    [
        ([], "unshared training with one budget or none"),
        ([*UNSHARED[:2], run(DELINKED, 1, 1.9)], "give --from the runs of unshared and of unshared-half, too"),
        (UNSHARED, "unshared training alone"),
        ([*UNSHARED, run(DELINKED, 1, 1.9, tokens=700)], "have 700 tokens, and unshared training has 800"),
        ([*UNSHARED, run(DELINKED, 3, 1.9)], "has the data.seed of a run of unshared training"),
        ([*UNSHARED, run(DELINKED, 1, 1.9), run(DELINKED, 1, 1.8)], "are two runs of"),
        (
            [run(REAL, 1, 2.0), run(REAL, 2, 2.5, tokens=400), run(DELINKED, 1, 1.9)],
            "have no seed (data.seed) in common",
        ),
        ([run(REAL, 1, 2.0), run(REAL, 1, 2.0, tokens=400), run(DELINKED, 1, 1.9)], "is no better with 800 tokens"),
        ([*UNSHARED, run(DELINKED, 1, 12.1)], "differ from unshared training by up to 10.1 nats"),
        ([run(REAL, 1, 2.0), run(REAL, 1, 2.0 + 1e-9, tokens=400), run(DELINKED, 1, 1.9)], "up to 0.1 nats"),
    ],
)
def test_runs_that_do_not_fit_together_are_refused(runs: list[Run], words: str) -> None:
    with pytest.raises(InvalidJobError, match=words.replace("(", r"\(").replace(")", r"\)")):
        trials_of(runs, "dense", 32, 1000)

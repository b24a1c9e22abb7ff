"""Rows of made-up trials."""

from collections.abc import Iterable, Mapping

from benchmarks.method.arms import ARMS, BUDGETS, REGISTERED, TUNED_FRACTION, TUNING_SEED, Arm, Study, full_steps
from benchmarks.method.results import Result, Role

LOWEST, RATE, HIGHEST = REGISTERED.first_rates
"""Peak rates that are tried first."""
WIDTH = REGISTERED.tuned_width
"""Width at which rates are chosen and all arms trained."""


def arm(study: Study, name: str) -> Arm:
    return next(arm for arm in ARMS[study] if arm.name == name)


def row(
    study: Study, name: str, seed: int, budget: float, loss: float, width: int = WIDTH, rate: float = RATE
) -> Result:
    return result(study, "compared", name, seed, budget, loss, width, rate)


def result(
    study: Study, role: Role, name: str, seed: int, budget: float, loss: float, width: int, rate: float
) -> Result:
    steps = round(budget * full_steps(study, width))
    return Result(
        study=study,
        role=role,
        width=width,
        arm=name,
        seed=seed,
        rate=rate,
        budget=budget,
        steps=steps,
        tokens=REGISTERED.tokens_of_a_step * steps,
        loss=loss,
        validation_tokens=250_000,
        seconds_per_step=0.1,
        peak_bytes=50 << 20,
        date="2026-01-02",
        commit="0123abcde",
    )


def curve(study: Study, name: str, seed: int, losses: Iterable[float], width: int = WIDTH) -> list[Result]:
    """Return the rows of an arm with one seed, one loss for each of the budgets that all arms have."""
    return [row(study, name, seed, budget, loss, width) for budget, loss in zip(BUDGETS, losses, strict=True)]


def rates(study: Study, losses: Mapping[float, float] | None = None) -> list[Result]:
    """Return the choice of all rates of a study; without `losses`, of RATE. `losses`: of half the budget."""
    tried = losses or {rate: 4.0 + abs(rate - RATE) for rate in REGISTERED.first_rates}
    full = {} if losses else {rate: loss for rate, loss in tried.items() if rate <= RATE}
    return [
        result(study, "tuning", one.name, TUNING_SEED, budget, loss, WIDTH, rate)
        for one in ARMS[study]
        if one.tuned_as == one.name
        for budget, found in ((TUNED_FRACTION, tried), (1.0, full))
        for rate, loss in found.items()
    ]

"""Rows of made-up trials."""

from collections.abc import Iterable, Mapping

from benchmarks.method.arms import ARMS, BUDGETS, FIRST_RATES, Arm, Study, full_steps
from benchmarks.method.results import Result, Role

RATE = FIRST_RATES[1]


def arm(study: Study, name: str) -> Arm:
    return next(arm for arm in ARMS[study] if arm.name == name)


def row(study: Study, name: str, seed: int, budget: float, loss: float, width: int = 16, rate: float = RATE) -> Result:
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
        tokens=2048 * steps,
        loss=loss,
        validation_tokens=250_000,
        seconds_per_step=0.1,
        peak_bytes=50 << 20,
        date="2026-01-02",
        commit="0123abcde",
    )


def curve(study: Study, name: str, seed: int, losses: Iterable[float], width: int = 16) -> list[Result]:
    """Return the rows of an arm with one seed, one loss for each budget."""
    return [row(study, name, seed, budget, loss, width) for budget, loss in zip(BUDGETS, losses, strict=True)]


def rates(study: Study, losses: Mapping[float, float] | None = None) -> list[Result]:
    """Return the choice of all rates of a study; without `losses`, of RATE."""
    tried = losses or {rate: 4.0 + abs(rate - RATE) for rate in FIRST_RATES}
    return [
        result(study, "tuning", one.name, 100, 0.5, loss, 16, rate)
        for one in ARMS[study]
        if one.tuned_as == one.name
        for rate, loss in tried.items()
    ]

"""Ten minutes of trials stand beside the registered results."""

from collections.abc import Mapping

from benchmarks.method.arms import ARMS, full_steps
from benchmarks.method.quick import Losses, losses_of, planned, verdict
from benchmarks.method.results import Result
from benchmarks.method.schedule import real_steps, unfinished

_RATES = {"unshared": 16e-3, "shared throughout": 32e-3, "delinked at 30 %": 16e-3, "grown from 4 layers at 30 %": 8e-3}


def _row(arm: str, loss: float, **changes: object) -> Result:
    row = {"study": "dense", "role": "compared", "width": 16, "arm": arm, "seed": 0, "rate": 8e-3, "budget": 1.0}
    measured = {"steps": 1, "tokens": 1, "loss": loss, "validation_tokens": 1, "seconds_per_step": 1, "peak_bytes": 1}
    return Result.model_validate(row | measured | {"date": "", "commit": ""} | changes)


def _tuning() -> list[Result]:
    """Return the rows of the choice of rates, with the lowest loss at `_RATES`."""
    return [
        _row(arm.name, abs(power - best), role="tuning", width=24, budget=budget, rate=8e-3 * 2.0**power)
        for arm in ARMS["dense"]
        for budget in (0.5, 1.0)
        for best in [{8e-3: 0, 16e-3: 1, 32e-3: 2}[_RATES.get(arm.name, 16e-3)]]
        for power in range(-1, 4)
    ]


def test_the_rates_are_the_registered_ones() -> None:
    assert {one.run.arm.name: one.run.rate for one in planned(_tuning())} == _RATES
    assert {one.run.rate for one in planned([])} == {8e-3}


def test_the_trials_fit_ten_minutes() -> None:
    """By counts: on two quiet cores a step takes 0.21 s, a start 2.5 s and a validation 14 s, two trainings at a time;
    the text takes a minute."""
    runs = [*planned(_tuning())]
    links = unfinished(runs, []).values()
    assert {one.run.seed for one in runs} == {0, 1}
    assert {one.run.steps for one in runs} == {full_steps("dense", 16)}
    seconds = sum(0.21 * real_steps(link) + 2.5 + 14 * (link.decay_from is not None) for link in links) / 2
    assert 60 + seconds < 480


def test_losses_are_means_at_the_full_budget_and_the_chosen_rates_of_the_width_with_most_arms() -> None:
    rates = dict.fromkeys(_RATES, 8e-3)
    rows = [
        *(_row("unshared", 2.0, seed=0), _row("unshared", 4.0, seed=1), _row("delinked at 30 %", 2.5)),
        *(_row("unshared", 9.0, budget=0.5), _row("unshared", float("nan"), seed=2), _row("small model", 1.0)),
        *(_row("unshared", 9.0, study="experts"), _row("unshared", 9.0, role="quick"), _row("unshared", 1.0, width=24)),
        _row("unshared", 9.0, rate=16e-3),
    ]
    assert losses_of(rows, "compared", rates) == Losses(16, 2, {"delinked at 30 %": 2.5, "unshared": 3.0})
    assert losses_of(rows, "quick", rates) is None


def test_registered_losses_are_those_of_the_same_width_if_it_has_two_arms() -> None:
    rates = dict.fromkeys(_RATES, 8e-3)
    small = [_row("unshared", 3.0), _row("delinked at 30 %", 3.5)]
    large = [_row(arm, 2.0, width=24) for arm in rates]
    assert losses_of([*small, *large], "compared", rates, preferred=16) == Losses(
        16, 1, {"unshared": 3.0, "delinked at 30 %": 3.5}
    )
    found = losses_of([*small[:1], *large], "compared", rates, preferred=16)
    assert found is not None
    assert found.width == 24


def _losses(by_arm: Mapping[str, float]) -> Losses:
    return Losses(16, 2, dict(sorted(by_arm.items(), key=lambda item: item[1])))


def test_the_order_is_judged_by_pairs_that_are_apart() -> None:
    registered = _losses({"a": 3.0, "b": 3.004, "c": 3.1})
    assert verdict(_losses({"a": 4.0, "b": 3.9, "c": 4.5}), registered) == (
        "The same order: of 2 pairs of arms that are further apart than 0.01 nats in the registered results, all stand"
        " in the same order here."
    )
    assert verdict(_losses({"a": 4.0, "b": 4.2, "c": 4.1}), registered) == (
        "Another order: of 2 pairs of arms that are further apart than 0.01 nats in the registered results, 1 stand the"
        " other way round here: c before b."
    )


def test_without_registered_results_there_is_no_order_to_compare() -> None:
    assert verdict(_losses({"a": 4.0, "b": 4.2}), None).startswith("docs/data/method.csv has no losses of these arms")
    assert verdict(None, None) == "fewer than two arms were trained"
    assert verdict(_losses({"a": 4.0, "b": 4.2}), _losses({"a": 3.0, "b": 3.001})).startswith("no two of these arms")

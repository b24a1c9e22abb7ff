"""The plan of the trials: what is trained follows from the results so far."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import log, nan

import pytest

from benchmarks.method.arms import ARMS, GPU, LAYERS, REGISTERED, REMEDIES, SIZES, TINY, Scale, Size, full_steps
from benchmarks.method.budget import tokens_within, with_tokens, work_of
from benchmarks.method.chain import Link
from benchmarks.method.results import Result
from benchmarks.method.schedule import Planned, expected, is_known, planned, rate_of, real_steps, unfinished
from tests.unit.benchmarks.method.support.planned import results_of
from tests.unit.benchmarks.method.support.samples import result

_BEST = {"dense": 23e-3, "experts": 5e-3}
"""Study -> rate with the lowest loss, of which one is beyond the first rates."""


def _trained(scale: Scale = REGISTERED, results: Iterable[Result] = (), diverges_above: float = 1.0) -> list[Planned]:
    """Return the runs in the order in which they are trained, one after the other."""
    found, order = [*results], []
    while one := next((one for one in planned(found, scale) if not _is_done(one, found)), None):
        loss = nan if one.run.rate > diverges_above else abs(log(one.run.rate / _BEST[one.run.study]))
        found += results_of(one, loss)
        order.append(one)
    return order


def _is_done(one: Planned, results: Sequence[Result]) -> bool:
    return all(is_known(one, budget, results) for budget in one.budgets)


@pytest.fixture(scope="module")
def order() -> list[Planned]:
    return _trained()


def test_nothing_is_trained_twice(order: list[Planned]) -> None:
    decays = [decay.key for one in order for _, decay in one.decays()]
    assert len(decays) == len({*decays})


def test_a_run_is_known_by_the_share_of_the_full_budget_that_it_trains(order: list[Planned]) -> None:
    tuning = next(one for one in order if one.role == "tuning")
    assert [result.budget for result in results_of(tuning, 1.0)] == [0.5]
    assert _is_done(tuning, results_of(tuning, 1.0))
    assert not _is_done(tuning, [row.model_copy(update={"budget": 1.0}) for row in results_of(tuning, 1.0)])


def test_the_best_rate_of_half_the_budget_is_held_against_lower_ones_at_the_full_budget(order: list[Planned]) -> None:
    """The best rates are 32e-3 and 4e-3 at every budget, so one lower rate is enough."""
    full = {(o.run.study, o.run.rate) for o in order if o.role == "tuning" and o.run.fraction == 1}
    assert full == {("dense", 32e-3), ("dense", 16e-3), ("experts", 4e-3), ("experts", 2e-3)}


def test_the_full_budget_chooses_where_the_budgets_disagree() -> None:
    half, full = {8e-3: 3.2, 16e-3: 3.1, 32e-3: 3.0, 64e-3: 3.3}, {32e-3: 2.9, 16e-3: 2.8}
    arm = ARMS["dense"][0]
    rows = [
        result("dense", "tuning", arm.name, 100, budget, loss, 24, rate)
        for budget, losses in ((0.5, half | {4e-3: 4.0}), (1.0, full))
        for rate, loss in losses.items()
    ]
    assert rate_of("dense", arm.name, rows) is None
    rows.append(result("dense", "tuning", arm.name, 100, 1.0, 2.85, 24, 8e-3))
    assert rate_of("dense", arm.name, rows) == 16e-3


def test_all_rates_of_a_study_are_chosen_before_its_first_comparison(order: list[Planned]) -> None:
    for study in ARMS:
        roles = [one.role for one in order if one.run.study == study]
        assert roles == ["tuning"] * roles.count("tuning") + ["compared"] * roles.count("compared")
    tuned = Counter((one.run.study, one.run.arm.name) for one in order if one.role == "tuning")
    assert {*tuned} == {(study, arm.tuned_as) for study, arms in ARMS.items() for arm in arms}


def test_rates_are_chosen_on_another_text_and_seed(order: list[Planned]) -> None:
    tuning = {(one.run.text, one.run.seed) for one in order if one.role == "tuning"}
    compared = {(one.run.text, one.run.seed) for one in order if one.role == "compared"}
    assert tuning == {("kernel-tuning", 100)}
    assert compared == {("kernel", seed) for seed in range(5)}


def test_compared_runs_have_the_best_rate_of_their_arm(order: list[Planned]) -> None:
    rates = {(one.run.study, one.run.rate) for one in order if one.role == "compared"}
    assert rates == {("dense", 32e-3), ("experts", 4e-3)}


def test_the_arms_of_the_conclusion_have_five_seeds_and_every_size(order: list[Planned]) -> None:
    found = Counter((o.run.study, o.run.width, o.run.arm.name) for o in order if o.role == "compared")
    for study, arms in ARMS.items():
        for arm in arms:
            for width in (16, 24, 32):
                seeds = 5 if arm.is_primary else 3 if width == 24 else 0
                assert found[study, width, arm.name] == seeds, (study, arm.name, width)


def test_sizes_follow_each_other_and_within_a_size_the_seeds(order: list[Planned]) -> None:
    runs = [one.run for one in order if one.role == "compared" and one.run.arm in ARMS[one.run.study]]
    compared = [(run.study, run.width, run.seed) for run in runs]
    places = [
        (next(rank for rank, size in enumerate(SIZES[study]) if size.width == width), study, seed)
        for study, width, seed in compared
    ]
    assert places == sorted(places)


def test_remedies_come_between_the_second_and_the_third_size(order: list[Planned]) -> None:
    """They have three seeds, at the rates of their base; one has the rates of the arms that its stages are like."""
    runs = [one.run for one in order if one.role == "compared"]
    places = [place for place, run in enumerate(runs) if run.arm in REMEDIES[run.study]]
    assert {run.width for run in runs[: places[0]]} == {24, 16}
    assert {run.width for run in runs[places[-1] + 1 :]} == {32}
    found = Counter((run.study, run.arm.name) for run in (runs[place] for place in places))
    assert found == {(study, arm.name): 3 for study, arms in REMEDIES.items() for arm in arms}
    assert {runs[place].first_rate for place in places} == {None, 32e-3, 4e-3}


_SMALL = replace(REGISTERED, remedies={}, arms={"dense": ARMS["dense"][:3]}, sizes={"dense": (Size(16, seeds=2),)})


def test_a_diverged_rate_ends_the_search_upwards() -> None:
    order = _trained(_SMALL, diverges_above=20e-3)
    assert {one.run.rate for one in order if one.role == "compared"} == {16e-3}
    assert max(one.run.rate for one in order) == 32e-3


def test_an_interrupted_plan_goes_on_where_it_was() -> None:
    order = _trained(_SMALL)
    half = [
        result
        for one in order[: len(order) // 2]
        for result in results_of(one, abs(log(one.run.rate / _BEST[one.run.study])))
    ]
    assert _labels(_trained(_SMALL, half)) == _labels(order[len(order) // 2 :])


def _labels(runs: Iterable[Planned]) -> list[str]:
    return [one.run.label for one in runs]


def test_a_missing_budget_is_trained_alone(order: list[Planned]) -> None:
    one = next(one for one in order if one.role == "compared")
    missing = [result for result in results_of(one, 1.0) if result.budget != 0.75]
    decays = [key for key, link in unfinished([one], missing).items() if link.decay_from is not None]
    assert decays == [dict(one.decays())[0.75].key]


@pytest.mark.parametrize("scale", [REGISTERED, GPU, TINY], ids=["registered", "gpu", "tiny"])
def test_links_are_listed_after_their_parents(scale: Scale) -> None:
    seen: set[str] = set()
    for link in unfinished(expected([], scale), []).values():
        assert link.parent is None or link.parent.key in seen
        seen.add(link.key)


def test_the_expected_work_is_the_work_if_one_further_rate_is_tried() -> None:
    """Each arm's best rate is the last of the first ones, so one more is tried; the assumed rate is another one."""
    scale = replace(GPU, first_rates=(6e-3, 12e-3, 24e-3))
    scale = replace(scale, arms={"dense": scale.arms["dense"]}, sizes={"dense": scale.sizes["dense"]})
    real = unfinished(_trained(scale), [])
    assumed = unfinished(expected([], scale), [])
    assert len(real) == len(assumed) == work_of(scale).links
    assert sum(map(real_steps, real.values())) == pytest.approx(work_of(scale).steps)
    # Once all rates are known, both say the same.
    tuning = [r for o in _trained(scale) if o.role == "tuning" for r in results_of(o, abs(log(o.run.rate / 23e-3)))]
    assert {*unfinished(expected(tuning, scale), tuning)} == {*unfinished(planned(tuning, scale), tuning)}


def test_steps_of_fewer_layers_count_by_their_layers() -> None:
    for one in expected([], REGISTERED):
        for _, decay in one.decays():
            for link in decay.ancestry():
                assert real_steps(link) == pytest.approx(_by_step(link))


def _by_step(link: Link) -> float:
    def layers(step: int) -> int:
        return next(stage.layers for stage in link.run.arm.stages if step <= round(stage.until * link.run.steps))

    return sum(layers(step) / LAYERS[link.run.study] for step in range(link.begin + 1, link.end + 1))


@pytest.mark.parametrize("hours", [12.0, 100.0, 1000.0])
def test_the_budget_that_fits_some_hours_takes_these_hours(hours: float) -> None:
    scale = replace(GPU, arms={"dense": GPU.arms["dense"]}, sizes={"dense": GPU.sizes["dense"]})
    tokens = tokens_within(scale, "dense", 3600 * hours, step=1.2, link=30.0)
    work = work_of(with_tokens(scale, "dense", tokens))
    assert work.seconds(1.2, 30.0) == pytest.approx(3600 * hours, rel=0.02)
    assert full_steps("dense", 768, with_tokens(scale, "dense", tokens)) * scale.tokens_of_a_step == tokens


def test_no_budget_fits_less_time_than_the_starts_take() -> None:
    scale = replace(GPU, arms={"dense": GPU.arms["dense"]}, sizes={"dense": GPU.sizes["dense"]})
    assert tokens_within(scale, "dense", 60.0, step=1.2, link=30.0) == 0


def test_a_rate_is_chosen_only_from_runs_of_the_width_that_chooses() -> None:
    arm = ARMS["dense"][0]
    for width, rate in ((16, None), (24, 32e-3)):
        scale = replace(_SMALL, tuned_width=width)
        runs = [one for one in _trained(scale) if one.role == "tuning"]
        rows = [row for one in runs for row in results_of(one, abs(log(one.run.rate / 32e-3)))]
        assert rate_of("dense", arm.tuned_as, rows, scale) == 32e-3
        assert rate_of("dense", arm.tuned_as, rows) == rate

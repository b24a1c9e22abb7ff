"""The registered comparison: pairs, verdicts per token and in seconds."""

from dataclasses import replace

import pytest

from benchmarks.method import costs
from benchmarks.method.analysis import (
    RATIOS,
    Comparison,
    Trial,
    comparisons,
    diverged,
    kind_of,
    leading,
    ranges,
    trials,
)
from benchmarks.method.arms import ARMS, REGISTERED, Size, Study
from benchmarks.method.results import Result
from tests.unit.benchmarks.method.support.samples import RATE, arm, curve, rates, row

UNSHARED = (3.4, 3.2, 3.0)
NOISE = (0.01, -0.01, 0.0)


def rows(name: str, offset: float, seeds: int = 3, noise: float = 0.02) -> list[Result]:
    """Return curves of an arm `offset` above unshared training; its differences scatter by `noise` times NOISE."""
    return [
        result
        for seed in range(seeds)
        for result in curve("dense", name, seed, [loss + seed + offset + noise * NOISE[seed] for loss in UNSHARED])
    ]


def unshared(seeds: int = 3) -> list[Result]:
    return rows("unshared", 0, seeds, noise=0)


def compared(*results: list[Result]) -> Comparison:
    return comparisons(trials([one for group in results for one in group]))[0]


def one(comparison: Comparison, name: str) -> Trial:
    return next(trial for trial in comparison.trials if trial.arm.name == name)


def test_kinds_of_all_arms() -> None:
    kinds = {arm.name: kind_of(arm) for arm in ARMS["dense"]}
    assert kinds["unshared"] == "unshared"
    assert {name for name, kind in kinds.items() if kind == "shared throughout"} == {
        "shared throughout",
        "4 blocks throughout",
    }
    assert {name for name, kind in kinds.items() if kind == "grown"} == {
        "grown from 4 layers at 30 %",
        "grown from 1 layer at 50 %",
    }
    assert kinds["small model"] == "small"
    assert kinds["1, 4, 12 blocks"] == kinds["delinked at 10 %"] == "delinked"
    experts = {arm.name: kind_of(arm) for arm in ARMS["experts"]}
    assert experts["upcycled from 2 experts at 30 %"] == "upcycled"
    assert experts["experts shared throughout"] == "shared throughout"
    assert experts["blocks delinked at 30 %"] == experts["experts delinked at 50 %"] == "delinked"


def test_differences_are_paired_by_seed() -> None:
    """Seeds differ by whole nats, the pairs by 0.05 ± 0.0002 alone."""
    found = one(compared(unshared(), rows("delinked at 30 %", 0.05)), "delinked at 30 %").difference()
    assert found is not None
    assert found.mean == pytest.approx(0.05)
    assert found.low == pytest.approx(0.05 - 4.3027 * 0.0002 / 3**0.5, abs=1e-6)


def test_seeds_that_unshared_training_lacks_are_left_out() -> None:
    trial = one(compared(unshared(seeds=2), rows("delinked at 30 %", 0.05, seeds=3)), "delinked at 30 %")
    difference = trial.difference()
    assert len(trial.curves) == 3
    assert difference is not None
    assert difference.seeds == 2


def test_an_arm_without_pairs_has_no_comparison() -> None:
    found = trials(rows("delinked at 30 %", 0.05))
    assert [trial.difference() for trial in found] == [None]
    assert [trial.speed_up() for trial in found] == [None]
    assert comparisons(found) == []


def test_a_curve_without_the_full_budget_or_with_a_diverged_one_does_not_count() -> None:
    half = [row("dense", "delinked at 30 %", 0, 0.5, 3.0)]
    lost = [*curve("dense", "delinked at 50 %", 0, (3.4, 3.2, float("nan")))]
    found = trials([*unshared(), *half, *lost])
    assert {trial.arm.name for trial in found} == {"unshared"}
    assert [result.arm for result in diverged(lost)] == ["delinked at 50 %"]


def test_a_diverged_smaller_budget_is_left_out_of_the_curve() -> None:
    found = trials(curve("dense", "unshared", 0, (float("nan"), 3.2, 3.0)))
    assert found[0].curves[0].losses == (3.2, 3.0)


def test_only_the_chosen_rate_counts_once_it_is_chosen() -> None:
    other = [row("dense", "unshared", 0, budget, 9.0, rate=2 * RATE) for budget in (0.5, 0.75, 1.0)]
    found = trials([*rates("dense"), *unshared(), *other])
    assert found[0].curves[0].final == 3.0


def test_results_of_other_roles_do_not_count() -> None:
    assert trials(rates("dense")) == []


class TestPerToken:
    def test_yes_and_no_need_the_whole_interval(self) -> None:
        found = compared(unshared(), rows("delinked at 10 %", -0.05), rows("delinked at 30 %", 0.05))
        assert found.per_token(one(found, "delinked at 10 %")) == "yes"
        assert found.per_token(one(found, "delinked at 30 %")) == "no"

    def test_a_small_open_difference_is_level(self) -> None:
        found = compared(unshared(), rows("delinked at 10 %", 0.001), rows("delinked at 30 %", 0.02, noise=5))
        assert found.per_token(one(found, "delinked at 10 %")) == "no"
        found = compared(unshared(), rows("delinked at 10 %", 0.001, noise=1), rows("delinked at 30 %", 0.02, noise=5))
        assert found.per_token(one(found, "delinked at 10 %")) == "level"
        assert found.per_token(one(found, "delinked at 30 %")) == "open"

    def test_a_mean_above_1_is_no_yes(self) -> None:
        found = compared(unshared(), rows("delinked at 10 %", -0.05, noise=10))
        speed = one(found, "delinked at 10 %").speed_up()
        assert speed is not None
        assert speed.mean > 1 > (speed.low or 1)
        assert found.per_token(one(found, "delinked at 10 %")) == "open"

    def test_one_seed_decides_nothing(self) -> None:
        found = compared(unshared(1), rows("delinked at 10 %", -0.5, 1), rows("delinked at 30 %", 0.0, 1))
        assert found.per_token(one(found, "delinked at 10 %")) == "open"
        assert found.per_token(one(found, "delinked at 30 %")) == "open"

    def test_a_bound_decides_only_on_its_side(self) -> None:
        found = compared(unshared(), rows("delinked at 10 %", -2), rows("delinked at 30 %", 2))
        assert found.per_token(one(found, "delinked at 10 %")) == "yes"
        assert found.per_token(one(found, "delinked at 30 %")) == "no"


class TestInSeconds:
    """Unshared training falls by 0.2 nats between 750 and 1,000 of its 1,000 parts, and by 0.2 between 500 and 750."""

    def test_speed_up_at_a_hand_computed_ratio(self) -> None:
        """0.1 below: 3.0 is reached halfway (in logarithms) between 0.75 and 1 of the tokens, at the root of 0.75.
        Of these, 0.3 cost a quarter."""
        trial = one(compared(unshared(), rows("delinked at 30 %", -0.1, noise=0)), "delinked at 30 %")
        found = trial.speed_up_in_seconds(4)
        assert found is not None
        # Budgets are whole steps, so their ratios differ from 0.75 a little.
        assert found.mean == pytest.approx(1 / (0.3 / 4 + 0.75**0.5 - 0.3), rel=2e-3)

    def test_yes_needs_to_lie_above_both_kinds_of_controls(self) -> None:
        shared, grown = rows("4 blocks throughout", 0.3), rows("grown from 4 layers at 30 %", 0.1)
        arm_rows = rows("delinked at 30 %", -0.05)
        whole = compared(unshared(), arm_rows, shared, grown)
        assert whole.in_seconds(one(whole, "delinked at 30 %"), 1.5) == "yes"
        for left in (shared, grown):
            part = compared(unshared(), arm_rows, left)
            assert part.in_seconds(one(part, "delinked at 30 %"), 1.5) == "open"

    def test_below_a_control_is_no_even_if_above_unshared_training(self) -> None:
        found = compared(unshared(), rows("delinked at 30 %", -0.02), rows("grown from 4 layers at 30 %", -0.1))
        trial = one(found, "delinked at 30 %")
        assert found.per_token(trial) == "yes"
        assert found.in_seconds(trial, 1) == "no"

    def test_below_a_small_model_is_no(self) -> None:
        """Its fewer operations make it faster, although it ends 0.2 above."""
        found = compared(unshared(), rows("delinked at 30 %", 0), rows("small model", 0.2))
        assert found.in_seconds(one(found, "delinked at 30 %"), 1) == "no"
        assert found.missing_controls[0] == "shared throughout"

    def test_sharing_throughout_wins_where_real_steps_are_dear(self) -> None:
        """Sharing throughout, 0.1 above, is 8 times as fast; the delinked arm at most 1 / 0.7, by its real steps."""
        found = compared(unshared(), rows("delinked at 30 %", 0.0), rows("shared throughout", 0.1))
        assert found.in_seconds(one(found, "delinked at 30 %"), 10) == "no"

    def test_a_control_with_only_an_upper_bound_makes_no_arm_a_no(self) -> None:
        """Sharing throughout ends above all losses of unshared training, whose smallest budget is a half: at most half
        as fast in tokens, so at most 5 times as fast in seconds at ratio 10."""
        found = compared(unshared(), rows("delinked at 30 %", 0.0), rows("shared throughout", 2))
        speed = one(found, "shared throughout").speed_up_in_seconds(10)
        assert speed is not None
        assert speed.at_most
        assert speed.mean == pytest.approx(5, rel=1e-2)
        assert found.in_seconds(one(found, "delinked at 30 %"), 10) == "open"

    def test_an_arm_with_only_an_upper_bound_is_no_yes(self) -> None:
        found = compared(unshared(), rows("shared throughout", 2), rows("grown from 4 layers at 30 %", 0.1))
        speed = one(found, "shared throughout").speed_up_in_seconds(15)
        assert speed is not None
        assert (speed.low or 0) > 5
        assert found.in_seconds(one(found, "shared throughout"), 15) == "open"

    def test_an_interval_that_reaches_above_the_controls_is_open(self) -> None:
        found = compared(unshared(), rows("delinked at 30 %", 0, noise=8), rows("grown from 4 layers at 30 %", 0.05))
        speed = one(found, "delinked at 30 %").speed_up_in_seconds(1)
        rival = one(found, "grown from 4 layers at 30 %").speed_up_in_seconds(1)
        assert speed is not None
        assert rival is not None
        assert speed.mean < rival.mean < (speed.high or 0)
        assert found.in_seconds(one(found, "delinked at 30 %"), 1) == "open"

    def test_a_control_is_held_against_the_others_and_not_against_itself(self) -> None:
        found = compared(unshared(), rows("grown from 4 layers at 30 %", -0.1), rows("shared throughout", 0.1))
        assert found.in_seconds(one(found, "grown from 4 layers at 30 %"), 1) == "yes"


def test_ratios_go_from_1_to_20() -> None:
    assert RATIOS[0] == 1
    assert RATIOS[-1] == pytest.approx(20)


def test_ranges_are_closed_and_split() -> None:
    found = [(1.0, "no"), (2.0, "yes"), (3.0, "yes"), (4.0, "open"), (5.0, "yes")]
    assert ranges(found, "yes") == [(2.0, 3.0), (5.0, 5.0)]
    assert ranges(found, "level") == []


def test_missing_controls_are_named() -> None:
    found = compared(unshared(), rows("shared throughout", 0.1))
    assert found.missing_controls == [
        "4 blocks throughout",
        "grown from 4 layers at 30 %",
        "grown from 1 layer at 50 %",
    ]


def test_the_page_answers_from_the_largest_complete_size() -> None:
    """Two sizes of all arms, each with 5 seeds of the primary ones."""
    sizes: dict[Study, tuple[Size, ...]] = {
        "dense": (Size(24, seeds=5, all_arms=True), Size(16, seeds=5, all_arms=True), Size(32, seeds=5))
    }
    scale = replace(REGISTERED, sizes=sizes)
    names = [one.name for one in ARMS["dense"] if one.is_primary]

    def size(width: int, seeds: int) -> list[Result]:
        return [r for name in names for seed in range(seeds) for r in curve("dense", name, seed, UNSHARED, width)]

    def chosen(*rows: list[Result]) -> list[int]:
        found = trials([one for group in rows for one in group], scale=scale)
        return [one.width for one in leading(comparisons(found))]

    assert chosen(size(16, 5), size(24, 4)) == [16]
    assert chosen(size(16, 5), size(24, 5)) == [24]
    assert chosen(size(16, 2), size(24, 2)) == [24]
    assert chosen(size(16, 5), size(24, 5), size(32, 5)) == [24], "size 32 has not all arms in the plan"


def test_losses_at_equal_operations_follow_the_plans_shares() -> None:
    """A grown arm has 0.8 of the operations; unshared training has 3.0 + 0.2 ln(0.8) / ln(0.75) there."""
    from math import log

    trial = one(compared(unshared(), rows("grown from 4 layers at 30 %", 0, noise=0)), "grown from 4 layers at 30 %")
    found = trial.difference_at_equal(costs.by_flops)
    assert found is not None
    assert found.mean == pytest.approx(-0.2 * log(0.8) / log(0.75), rel=1e-2)
    assert trial.arm is arm("dense", "grown from 4 layers at 30 %")

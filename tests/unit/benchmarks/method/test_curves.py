"""Curves of loss against tokens, and where two of them meet."""

from math import exp, log, sqrt

import pytest

from benchmarks.method.costs import Spending
from benchmarks.method.curves import Curve, difference_at_equal_cost, mean_curve, meeting

TOKENS = (500, 750, 1000)
EQUAL = Spending((1.0,), (1.0,))


def line(height: float, slope: float = 1.0) -> Curve:
    """Return height - slope * ln(tokens / 1000), which interpolation in the logarithm of tokens must read exactly."""
    return Curve(TOKENS, tuple(height - slope * log(tokens / 1000) for tokens in TOKENS))


def test_a_straight_line_over_the_logarithm_is_read_exactly() -> None:
    found = line(3.0).reaches(3.1)
    assert found is not None
    assert found.tokens == pytest.approx(1000 * exp(-0.1))
    assert not found.was_reached_before
    assert line(3.0).loss_at(900) == pytest.approx(3 - log(0.9))


def test_the_speed_up_is_the_ratio_of_tokens_to_the_final_loss_of_unshared_training() -> None:
    found = meeting(line(2.9), line(3.0))
    assert found.speed_up(EQUAL) == pytest.approx(exp(0.1))
    assert found.bound is None


def test_an_arm_that_does_not_reach_the_loss_is_read_on_the_unshared_curve() -> None:
    """Unshared training has the arm's final loss, 3.1, after exp(-0.1) of its tokens."""
    found = meeting(line(3.1), line(3.0))
    assert found.speed_up(EQUAL) == pytest.approx(exp(-0.1))
    assert found.bound is None


def test_the_steepness_of_the_curve_that_is_read_decides() -> None:
    """The arm is twice as steep: it has 3.0 after exp(-0.05) of the tokens."""
    assert meeting(line(2.9, slope=2), line(3.0)).speed_up(EQUAL) == pytest.approx(exp(0.05))
    assert meeting(line(3.1, slope=2), line(3.0)).speed_up(EQUAL) == pytest.approx(exp(-0.1))


def test_beyond_the_smallest_budget_a_speed_up_is_a_bound() -> None:
    slower, faster = meeting(line(5.0), line(3.0)), meeting(line(1.0), line(3.0))
    assert (slower.speed_up(EQUAL), slower.bound) == (0.5, "at most")
    assert (faster.speed_up(EQUAL), faster.bound) == (2.0, "at least")


def test_a_loss_at_the_smallest_budget_itself_is_no_bound() -> None:
    found = line(3.0).reaches(line(3.0).losses[0])
    assert found is not None
    assert (found.tokens, found.was_reached_before) == (500, False)


def test_the_first_of_several_crossings_counts() -> None:
    found = Curve((100, 200, 400), (4.0, 3.0, 3.5)).reaches(3.5)
    assert found is not None
    assert found.tokens == pytest.approx(100 * sqrt(2))


def test_a_curve_with_one_budget_gives_a_bound() -> None:
    found = meeting(Curve((1000,), (2.9,)), line(3.0))
    assert (found.speed_up(EQUAL), found.bound) == (1.0, "at least")


def test_equal_curves_have_speed_up_1() -> None:
    assert meeting(line(3.0), line(3.0)).speed_up(EQUAL) == pytest.approx(1)


def test_a_cheap_stage_is_cheap_until_its_end() -> None:
    """To 0.4 of the tokens, the first 0.3 cost a quarter each."""
    spending = Spending((0.3, 1.0), (0.25, 1.0))
    assert spending.until(0.2) == pytest.approx(0.05)
    assert spending.until(0.4) == pytest.approx(0.3 * 0.25 + 0.1)
    assert spending.until(1) == pytest.approx(0.775)
    assert meeting(line(3.0), line(3.0)).speed_up(spending) == pytest.approx(1 / 0.775)


def test_loss_at_equal_cost_is_read_at_the_tokens_of_the_same_cost() -> None:
    """The arm costs 0.8 of unshared training, which has 3 - ln 0.8 there."""
    spending = Spending((0.3, 1.0), (1 / 3, 1.0))
    found = difference_at_equal_cost(line(3.0), line(3.0), spending)
    assert found == pytest.approx(log(0.8))


def test_loss_at_a_cost_below_the_smallest_budget_is_unknown() -> None:
    assert difference_at_equal_cost(line(3.0), line(3.0), Spending((1.0,), (0.4,))) is None


def test_the_mean_curve_has_the_budgets_that_all_seeds_have() -> None:
    found = mean_curve([Curve((500, 750, 1000), (5.0, 4.0, 3.0)), Curve((500, 1000), (5.2, 3.2))])
    assert found.tokens == (500, 1000)
    assert found.losses == pytest.approx((5.1, 3.1))

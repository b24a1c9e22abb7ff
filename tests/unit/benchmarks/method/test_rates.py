"""Peak rates are tried until the best one has a worse one on both sides."""

from math import inf, log, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.method.rates import best_rate, next_lower_rates, next_rates

_FIRST = (4e-3, 8e-3, 16e-3)


@given(best=st.floats(1e-5, 10), diverges_above=st.floats(4e-3, 100) | st.just(inf))
def test_rates_are_extended_until_the_best_is_inside(best: float, diverges_above: float) -> None:
    """With losses that fall and rise, the best of what was tried has a worse or diverged rate on both sides."""
    losses: dict[float, float] = {}
    while rates := next_rates(losses, _FIRST):
        for rate in rates:
            assert rate not in losses
            losses[rate] = abs(log(rate / best)) if rate <= diverges_above else nan
    chosen = best_rate(losses)
    assert min(losses) < chosen < max(losses)
    assert {*_FIRST} <= {*losses}
    for rate in (chosen / 2, chosen * 2):
        assert not losses[rate] < losses[chosen]
    # No rate is tried that is no neighbour of one that was the best.
    grid = sorted(losses)
    assert grid == pytest.approx([grid[0] * 2**power for power in range(len(grid))])


def test_the_first_rates_come_first_and_in_order() -> None:
    assert next_rates({}, _FIRST) == [*_FIRST]
    assert next_rates({8e-3: 1.0}, _FIRST) == [4e-3, 16e-3]


def test_a_diverged_rate_is_never_the_best() -> None:
    assert best_rate({4e-3: 2.0, 8e-3: nan, 16e-3: 3.0}) == 4e-3
    assert next_rates({4e-3: 2.0, 8e-3: nan, 16e-3: 3.0}, _FIRST) == [2e-3]


def test_without_a_finite_loss_there_is_no_choice() -> None:
    with pytest.raises(ValueError, match=r"no rate of \[0\.004, 0\.008, 0\.016\] has a finite loss"):
        next_rates(dict.fromkeys(_FIRST, nan), _FIRST)


@pytest.mark.parametrize(("best", "tried"), [(32e-3, [32e-3, 16e-3]), (16e-3, [32e-3, 16e-3, 8e-3]), (5e-3, None)])
def test_at_the_full_budget_lower_rates_are_tried_until_the_best_is_not_the_lowest(
    best: float, tried: list[float] | None
) -> None:
    losses: dict[float, float] = {}
    while rates := next_lower_rates(losses, 32e-3):
        losses |= {rate: abs(log(rate / best)) for rate in rates}
    assert [*losses] == (tried or [32e-3, 16e-3, 8e-3, 4e-3, 2e-3])
    assert best_rate(losses) == (best if tried else 4e-3)

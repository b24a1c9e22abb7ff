from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pseudoreal_trainer.data.mixture import Mixture, mixture

weights = st.lists(st.integers(0, 60), min_size=1, max_size=12).filter(any)
FURTHEST_BEHIND_FAILS = [12, 3, 1, 1, 12]
"""Taking the source that is furthest behind is 1.03 samples off somewhere."""


def _located(mixed: Mixture, first: int, end: int) -> list[tuple[int, int]]:
    sources, numbers = mixed.locate(np.arange(first, end))
    return list(zip(sources.tolist(), numbers.tolist(), strict=True))


@given(weights)
@example(FURTHEST_BEHIND_FAILS)
@example([30, 5, 1, 3, 30, 30, 1, 5, 1])
def test_every_prefix_is_less_than_one_sample_off(weights: list[int]) -> None:
    mixed, total = mixture(weights), sum(weights)
    taken = [0] * len(weights)
    for count, (source, number) in enumerate(_located(mixed, 0, total), start=1):
        assert number == taken[source], "no sample of a source is repeated or skipped"
        taken[source] += 1
        assert all(abs(have - Fraction(weight * count, total)) < 1 for have, weight in zip(taken, weights, strict=True))
        assert mixed.counts(count) == taken
    assert taken == weights, "a period is exact"


@given(weights, st.integers(0, 10**15), st.integers(0, 50))
def test_any_place_is_known_without_those_before_it(weights: list[int], first: int, count: int) -> None:
    mixed = mixture(weights)
    before = mixed.counts(first)
    assert sum(before) == first
    for source, number in _located(mixed, first, first + count):
        assert number == before[source]
        before[source] += 1
    assert mixed.counts(first + count) == before


def test_tables_are_fixed() -> None:
    """Computed by hand. Training that started with these orders must continue with them."""
    assert [source for source, _ in _located(mixture([1, 2]), 0, 6)] == [1, 0, 1, 1, 0, 1]
    assert [source for source, _ in _located(mixture([3, 1]), 0, 4)] == [0, 0, 0, 1]
    assert [source for source, _ in _located(mixture([2, 2, 0, 6]), 0, 5)] == [3, 3, 0, 1, 3]


def test_a_common_divisor_makes_no_difference() -> None:
    assert mixture([200, 300]).weights == (2, 3)
    assert mixture([5]).weights == (1,)


def test_a_period_that_is_no_table_any_more_is_refused() -> None:
    assert len(mixture([99_999, 1]).slots) == 100_000
    assert mixture([10**12, 3 * 10**12]).weights == (1, 3)
    with pytest.raises(ValueError, match=r"add up to 100,001, but the sum must be at most 100,000; use small"):
        mixture([100_000, 1])

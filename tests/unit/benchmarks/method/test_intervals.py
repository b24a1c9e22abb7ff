"""Student's intervals."""

from math import gamma, pi, sqrt

import numpy as np
import pytest
from pseudoreal_trainer.estimate.advice.intervals import student

from benchmarks.method.intervals import estimate


@pytest.mark.parametrize("degrees", range(1, 31))
def test_quantiles_leave_a_fortieth_of_the_density_above(degrees: int) -> None:
    """The density is integrated from 0 to the quantile; between it and its negative lie 95 %. The table has four digits
    after the point."""
    factor = gamma((degrees + 1) / 2) / (sqrt(degrees * pi) * gamma(degrees / 2))
    x = np.linspace(0, student(degrees), 20_001)
    density = factor * (1 + x**2 / degrees) ** (-(degrees + 1) / 2)
    assert float(np.trapezoid(density, x)) == pytest.approx(0.475, abs=4e-6)


def test_interval_of_five_values() -> None:
    """2.776 is the table's value for 4 degrees of freedom; the deviation of 1 to 5 is the root of 2.5."""
    found = estimate([1, 2, 3, 4, 5])
    half = 2.776 * sqrt(2.5) / sqrt(5)
    assert (found.mean, found.seeds) == (3, 5)
    assert found.low == pytest.approx(3 - half, abs=1e-3)
    assert found.high == pytest.approx(3 + half, abs=1e-3)


def test_one_value_has_no_interval() -> None:
    found = estimate([1.5])
    assert (found.mean, found.low, found.high) == (1.5, None, None)


def test_more_than_30_degrees_of_freedom_have_a_wider_interval_than_needed() -> None:
    assert student(500) == student(30) > 1.96


def test_no_degree_of_freedom_has_no_quantile() -> None:
    with pytest.raises(ValueError, match="at least 1 degree"):
        student(0)

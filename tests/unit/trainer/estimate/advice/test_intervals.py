"""Student's intervals, held against the distribution's density and against figures computed by hand."""

from math import gamma, pi, sqrt

import pytest
from pseudoreal_trainer.estimate.advice.intervals import interval, student


@pytest.mark.parametrize("degrees", range(1, 31))
def test_95_percent_of_the_distribution_lie_within_the_quantile(degrees: int) -> None:
    scale = gamma((degrees + 1) / 2) / (sqrt(degrees * pi) * gamma(degrees / 2))
    end, steps = student(degrees), 4000
    width = end / steps
    values = [scale * (1 + (i * width) ** 2 / degrees) ** (-(degrees + 1) / 2) for i in range(steps + 1)]
    simpson = width / 3 * (values[0] + values[-1] + 4 * sum(values[1:-1:2]) + 2 * sum(values[2:-1:2]))
    assert 2 * simpson == pytest.approx(0.95, abs=5e-6)


def test_above_30_degrees_of_freedom_the_interval_is_rather_too_wide() -> None:
    assert student(100) == student(30) > 1.98397


def test_interval_of_three_values() -> None:
    """1, 2 and 6: mean 3, variance (4 + 1 + 9) / 2 = 7, half width 4.3027 sqrt(7 / 3) = 6.5724."""
    found = interval([1, 2, 6])
    assert found.mean == 3
    assert found.low == pytest.approx(-3.5724, abs=1e-4)
    assert found.high == pytest.approx(9.5724, abs=1e-4)


def test_one_value_has_no_interval() -> None:
    found = interval([1.5])
    assert (found.mean, found.low, found.high) == (1.5, None, None)

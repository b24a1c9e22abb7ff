"""Lines of differences over the size."""

from math import log, sqrt

import numpy as np
import pytest

from benchmarks.method.analysis import trials
from benchmarks.method.trend import Sample, Trend, samples_of, trend
from tests.unit.benchmarks.method.support.samples import curve


def test_a_straight_line_is_found_with_its_slope_for_a_doubling() -> None:
    found = trend([Sample(1000, (0.03, 0.03)), Sample(2000, (0.02, 0.02)), Sample(4000, (0.01, 0.01))])
    assert isinstance(found, Trend)
    assert found.slope.mean == pytest.approx(-0.01)
    assert found.slope.low == pytest.approx(-0.01)
    assert found.at(8000) == pytest.approx(0.0, abs=1e-12)


def test_slope_and_interval_are_those_of_numpys_regression() -> None:
    samples = [Sample(1000, (0.031, 0.028, 0.035)), Sample(3000, (0.02, 0.026)), Sample(9000, (0.013, 0.008, 0.017))]
    found = trend(samples)
    assert isinstance(found, Trend)
    x = np.array([log(s.parameters) / log(2) for s in samples for _ in s.differences])
    y = np.array([d for s in samples for d in s.differences])
    (slope, _), covariance = np.polyfit(x, y, 1, cov=True)
    assert found.slope.mean == pytest.approx(float(slope))
    # 2.447 is the table's value for 8 - 2 degrees of freedom.
    half = 2.4469 * sqrt(float(covariance[0, 0]))
    assert found.slope.high == pytest.approx(float(slope) + half)


def test_one_size_or_one_seed_of_two_sizes_gives_a_sentence() -> None:
    assert trend([Sample(1000, (0.1, 0.2))]) == "one size, no trend"
    assert trend([Sample(1000, (0.1,)), Sample(2000, (0.2,))]) == "one seed of each size, no interval"


def test_one_seed_of_three_sizes_gives_a_line() -> None:
    found = trend([Sample(1000, (0.1,)), Sample(2000, (0.2,)), Sample(4000, (0.1,))])
    assert isinstance(found, Trend)
    assert found.slope.low is not None
    assert found.slope.low < 0 < (found.slope.high or 0)


def test_samples_are_paired_differences_ascending_by_size() -> None:
    rows = [
        *curve("dense", "unshared", 0, (3.2, 3.1, 3.0), width=24),
        *curve("dense", "delinked at 30 %", 0, (3.2, 3.1, 3.05), width=24),
        *curve("dense", "unshared", 1, (3.4, 3.3, 3.2), width=16),
        *curve("dense", "delinked at 30 %", 1, (3.4, 3.3, 3.1), width=16),
        *curve("dense", "delinked at 30 %", 2, (3.4, 3.3, 3.1), width=32),
    ]
    found = samples_of(trials(rows), "delinked at 30 %")
    assert [sample.parameters for sample in found] == [36_864, 82_944]
    assert [sample.mean for sample in found] == pytest.approx([-0.1, 0.05])

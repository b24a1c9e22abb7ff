import math
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pseudoreal_trainer.data.permutation import NAME, permute

from tests.unit.trainer.data.support.slow_permutation import permuted, splitmix64

words = st.integers(0, 2**64 - 1)
VECTORS = {
    (10, 0, 0): [2, 9, 3, 0, 7, 6, 5, 4, 8, 1],
    (10, 0, 1): [3, 4, 1, 7, 2, 5, 6, 0, 9, 8],
    (10, 2**31, 7): [5, 7, 8, 9, 0, 1, 2, 6, 3, 4],
    (10**12 + 1, 5, 3): [347887202614, 536441771960, 920845799761],
}
"""From the slow implementation."""


def _all(count: int, *key: int) -> list[int]:
    return [int(index) for index in permute(np.arange(count, dtype=np.uint64), count, *key)]


@settings(deadline=None)
@given(st.integers(1, 3000), st.integers(0, 2**31), st.integers(0, 10**6))
def test_it_is_a_permutation(count: int, seed: int, epoch: int) -> None:
    assert sorted(_all(count, seed, epoch)) == list(range(count))


@settings(deadline=None)
@given(st.integers(1, 2**62), st.lists(words, min_size=1, max_size=3), st.data())
def test_each_entry_is_what_the_slow_one_says(count: int, key: list[int], data: st.DataObject) -> None:
    indices = data.draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=5))
    found = permute(np.array(indices, dtype=np.uint64), count, *key).tolist()
    assert found == [permuted(index, count, *key) for index in indices]


def test_its_vectors_are_fixed() -> None:
    """Training that started with these orders must continue with them: the output under this name must never change."""
    assert NAME == "feistel-splitmix64-v1"
    assert _all(10, 0, 0) == VECTORS[10, 0, 0]
    assert _all(10, 0, 1) == VECTORS[10, 0, 1]
    assert _all(10, 2**31, 7) == VECTORS[10, 2**31, 7]
    far = np.array([0, 1, 10**12], dtype=np.uint64)
    assert permute(far, 10**12 + 1, 5, 3).tolist() == VECTORS[10**12 + 1, 5, 3]


def test_splitmix64_is_that_of_its_authors() -> None:
    """The first outputs for the seed 1234567, as published with the reference implementation in C."""
    outputs = [splitmix64(1234567 + turn * 0x9E3779B97F4A7C15 & 2**64 - 1) for turn in range(3)]
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@pytest.mark.parametrize("count", [256, 4096, 5000, 65_537])
def test_neighbours_go_anywhere(count: int) -> None:
    """Chi-squared of the differences of neighbours, in 64 classes, over 20 keys: expected 63 with a deviation of 2.5.
    With two rounds of the network instead of four, the larger sizes give thousands."""
    found = []
    for seed in range(20):
        entries = np.array(_all(count, seed, 0), dtype=np.int64)
        classes = (entries[1:] - entries[:-1]) % count * 64 // count
        expected = (count - 1) / 64
        found.append(float(((np.bincount(classes, minlength=64) - expected) ** 2 / expected).sum()))
    assert 63 - 15 < sum(found) / len(found) < 63 + 15


@pytest.mark.parametrize("count", [25, 1000])
def test_every_entry_goes_everywhere(count: int) -> None:
    """Over many epochs, entry 0 is uniform over all places: chi-squared within five deviations."""
    epochs = 40 * count
    first = [permuted(0, count, 3, epoch) for epoch in range(epochs)]
    chi = ((np.bincount(first, minlength=count) - 40) ** 2 / 40).sum()
    assert abs(chi - (count - 1)) < 5 * math.sqrt(2 * (count - 1))


def test_fixed_points_are_as_many_as_chance_gives() -> None:
    fixed = [sum(i == entry for i, entry in enumerate(_all(1000, seed, 0))) for seed in range(400)]
    assert abs(sum(fixed) / len(fixed) - 1) < 0.25, "five deviations of the mean"


def test_it_holds_no_list_of_samples() -> None:
    tracemalloc.start()
    permute(np.arange(64, dtype=np.uint64), 2 * 10**12, 1, 2)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100_000

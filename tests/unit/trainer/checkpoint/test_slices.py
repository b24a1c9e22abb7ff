"""Slices of a matrix's columns, read from any files, against numpy's own slices."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
from pseudoreal_trainer.checkpoint import slices
from pseudoreal_trainer.checkpoint.manifest import StoredTensor
from pseudoreal_trainer.checkpoint.slices import read_in_slice
from pydantic import ValidationError

ROWS, COLUMNS = 5, 12
MATRIX = np.arange(ROWS * COLUMNS, dtype=np.float32).reshape(ROWS, COLUMNS)


@dataclass
class _Source:
    """A matrix, flattened row by row, that counts what is read of it."""

    longest: int = 0
    ranges: list[tuple[int, int]] = field(default_factory=list)

    def read(self, begin: int, end: int) -> np.ndarray:
        assert 0 <= begin < end <= MATRIX.size
        self.longest = max(self.longest, end - begin)
        self.ranges.append((begin, end))
        return MATRIX.reshape(-1)[begin:end].copy()


def _ranges(count: int) -> Iterator[tuple[int, int]]:
    """Yield every range inside one of `count` slices."""
    of_slice = MATRIX.size // count
    for first in range(0, MATRIX.size, of_slice):
        for begin in range(first, first + of_slice):
            yield from ((begin, end) for end in range(begin + 1, first + of_slice + 1))


@pytest.mark.parametrize("count", [2, 3, 6])
@pytest.mark.parametrize("most", [1 << 22, 1, 2 * COLUMNS])
def test_every_range_of_a_slice_has_the_elements_of_the_slice(
    count: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slices, "_CHUNK", most)
    expected = np.concatenate([part.reshape(-1) for part in np.split(MATRIX, count, axis=1)])
    for begin, end in _ranges(count):
        source = _Source()
        found = read_in_slice(source.read, MATRIX.shape, count, begin, end)
        np.testing.assert_array_equal(found, expected[begin:end])
        assert source.longest <= max(most, COLUMNS)


def test_a_range_over_two_slices_is_refused() -> None:
    with pytest.raises(AssertionError, match="the range is in one slice"):
        read_in_slice(_Source().read, MATRIX.shape, 2, MATRIX.size // 2 - 1, MATRIX.size // 2 + 1)


@pytest.mark.parametrize(("shape", "count"), [((12,), 2), ((5, 12), 5), ((2, 5, 12), 2), ((5, 12), 0), ((5, 12), -1)])
def test_slices_that_a_tensor_cannot_have_are_refused(shape: tuple[int, ...], count: int) -> None:
    with pytest.raises(ValidationError, match=r"slices of columns|greater than or equal to 1"):
        StoredTensor(shape=shape, dtype="float32", column_slices=count, pieces=[])

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from pseudoreal_api.spec.phase import Batch
from pseudoreal_trainer.data.documents import Counts, count_documents, document_lengths, has_target
from pseudoreal_trainer.data.stream import rank_parts

from tests.unit.trainer.data.support.cut import cut

END = 0
rows = st.integers(1, 9).flatmap(
    lambda width: st.lists(st.lists(st.integers(0, 3), min_size=width + 1, max_size=width + 1), min_size=1, max_size=4)
)
"""Windows of small tokens, so that ends of documents are frequent, also at borders and adjacent to each other."""
Tokens = NDArray[np.int32]


def _array(windows: list[list[int]]) -> Tokens:
    return np.array(windows, np.int32)


def _pairs(length: int, window: int | None) -> int:
    """Return twice the number of (query, key) pairs of a document, as operations are counted: L * L without a window; a
    window cuts off a triangle, which is subtracted twice."""
    return length**2 - (0 if window is None or window >= length else (length - window) ** 2)


@given(rows, st.sampled_from([None, 1, 2, 3, 20]))
def test_what_is_counted_is_what_a_person_counts(windows: list[list[int]], window: int | None) -> None:
    parts = [part for row in windows for part in cut(row, END)]
    array = _array(windows)
    assert document_lengths(array, END).tolist() == [len(part) for part in parts]
    wanted = [target is not None for part in parts for _, target in part]
    assert has_target(array, END).flatten().tolist() == wanted
    found = count_documents(array, END, [window, 4])
    assert found.targets == sum(wanted)
    assert found.twice_the_pairs == {w: sum(_pairs(len(part), w) for part in parts) for w in (window, 4)}


def test_an_example() -> None:
    windows = _array([[5, 6, END, 7, END, END, 8, 9]])
    assert document_lengths(windows, END).tolist() == [3, 2, 1, 1]
    assert has_target(windows, END).tolist() == [[True, True, False, True, False, False, True]]
    assert count_documents(windows, END, [None, 2]) == Counts(4, {None: 15, 2: 14})


def test_without_an_end_a_window_is_one_document() -> None:
    windows = _array([[5, 6, 7], [6, 7, END]])
    assert count_documents(windows, END, [None]) == Counts(4, {None: 8})


def test_no_window_counts_nothing() -> None:
    """A rank has no window if a micro-batch has fewer sequences than there are ranks."""
    assert count_documents(np.empty((0, 8), np.int32), END, [None, 3]) == Counts(0, {None: 0, 3: 0})


@pytest.mark.parametrize(("ranks", "micro_batches"), [(1, 1), (2, 3), (5, 2)])
def test_counts_of_all_ranks_add_up_to_those_of_the_step(ranks: int, micro_batches: int) -> None:
    windows = np.random.default_rng(5).integers(0, 4, (42, 8)).astype(np.int32)
    parts = [
        part
        for rank in range(ranks)
        for part in rank_parts(Batch(sequences=12, micro_batches=micro_batches), 30, rank, ranks)
    ]
    total = Counts(0, {None: 0})
    for first, end in parts:
        total += count_documents(windows[first:end], END, [None])
    assert total == count_documents(windows[30:42], END, [None])

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from pseudoreal_api.spec.phase import Batch
from pseudoreal_trainer.data import documents
from pseudoreal_trainer.data.documents import (
    IGNORED,
    borders,
    count_targets,
    document_numbers,
    positions,
    targets,
)
from pseudoreal_trainer.data.stream import rank_parts

END = 0
rows = st.integers(1, 9).flatmap(
    lambda width: st.lists(st.lists(st.integers(0, 3), min_size=width + 1, max_size=width + 1), min_size=1, max_size=4)
)
"""Windows of small tokens, so that ends of documents are common, also at the borders and one behind the other."""


def _documents(row: list[int]) -> list[list[tuple[int, int | None]]]:
    """The parts of documents in a window, each as pairs of an input token and its target, read as a person would: a
    window is cut behind each end, and each part predicts itself, shifted by one."""
    parts: list[list[int]] = [[]]
    for token in row:
        parts[-1].append(token)
        if token == END:
            parts.append([])
    shifted = [[*zip(part, [*part[1:], None], strict=True)] for part in parts if part]
    # The last token of a window is a target alone.
    shifted[-1].pop()
    return [part for part in shifted if part]


def _array(windows: list[list[int]]) -> NDArray[np.int32]:
    return np.array(windows, np.int32)


@given(rows)
def test_documents_of_windows_are_those_that_a_person_cuts(windows: list[list[int]]) -> None:
    expected = [_documents(row) for row in windows]
    array = _array(windows)
    for row, parts in enumerate(expected):
        numbers = [number for number, part in enumerate(parts) for _ in part]
        assert document_numbers(array, END)[row].tolist() == numbers
        assert positions(array, END)[row].tolist() == [place for part in parts for place in range(len(part))]
        wanted = [IGNORED if target is None else target for part in parts for _, target in part]
        assert targets(array, END)[row].tolist() == wanted
    lengths = [len(part) for parts in expected for part in parts]
    assert borders(array, END).tolist() == [sum(lengths[:count]) for count in range(len(lengths) + 1)]


def test_an_example() -> None:
    windows = _array([[5, 6, END, 7, END, END, 8, 9]])
    assert document_numbers(windows, END).tolist() == [[0, 0, 0, 1, 1, 2, 3]]
    assert positions(windows, END).tolist() == [[0, 1, 2, 0, 1, 0, 0]]
    assert targets(windows, END).tolist() == [[6, END, IGNORED, END, IGNORED, IGNORED, 9]]
    assert borders(windows, END).tolist() == [0, 3, 5, 6, 7]


def test_without_an_end_a_window_is_one_document() -> None:
    windows = _array([[5, 6, 7], [6, 7, END]])
    assert positions(windows, END).tolist() == [[0, 1]] * 2
    assert targets(windows, END).tolist() == windows[:, 1:].tolist()
    assert borders(windows, END).tolist() == [0, 2, 4]


def test_results_are_32_bits_wide() -> None:
    windows = _array([[1, END, 2]])
    assert {each(windows, END).dtype for each in (document_numbers, positions, targets, borders)} == {np.dtype("i4")}


class _Stream:
    sequence = 7

    def __init__(self) -> None:
        self._windows = np.random.default_rng(5).integers(0, 4, (100, 8))

    def windows(self, first: int, end: int) -> NDArray[Any]:
        return self._windows[first:end]


@pytest.mark.parametrize("portion", [1, 20, 1 << 22])
@pytest.mark.parametrize(("ranks", "micro_batches"), [(1, 1), (2, 3), (5, 2)])
def test_every_rank_knows_what_the_step_is_divided_by(
    monkeypatch: pytest.MonkeyPatch, portion: int, ranks: int, micro_batches: int
) -> None:
    monkeypatch.setattr(documents, "_PORTION", portion)
    stream, batch = _Stream(), Batch(sequences=12, micro_batches=micro_batches)
    brute = sum(
        target is not None for row in stream.windows(30, 42).tolist() for part in _documents(row) for _, target in part
    )
    assert count_targets(stream, 30, 42, END) == brute
    parts = [part for rank in range(ranks) for part in rank_parts(batch, 30, rank, ranks)]
    assert sum(count_targets(stream, *part, END) for part in parts) == brute

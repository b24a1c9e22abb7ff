"""The baselines of the benchmark of a layer with documents."""

import pytest
import torch

from benchmarks import documents


def test_documents_have_the_length_that_was_asked_for() -> None:
    assert documents.tokens_of(8, 3).tolist() == 2 * [[1, 1, 0, 1, 1, 0, 1, 1, 0]]


def test_one_document_as_long_as_a_sequence_saves_nothing() -> None:
    assert documents.operations_ratio(64, 64) == 1.0
    # Per token, a layer without attention needs 2 * 12 * 512 ** 2 operations; attention halves with the documents.
    matrices, attention = 24 * 512**2, 2 * 512 * 64
    assert documents.operations_ratio(64, 32) == pytest.approx((matrices + attention) / (matrices + attention / 2))


def test_rounds_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "_ROUNDS", 2)
    torch.set_num_threads(1)
    assert len(documents.compare(8, 3)) == 2

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pseudoreal_api.spec.phase import Batch
from pseudoreal_trainer.data.stream import Stream, rank_parts

from tests.unit.trainer.data.support.slow_permutation import permuted

TEXT = np.arange(251, dtype=np.uint8)
"""Every byte is its own position, so a window shows its location."""


def _starts(stream: Stream, first: int, end: int) -> list[int]:
    return [int(window[0]) for window in stream.windows(first, end)]


def test_an_epoch_is_every_window_once_and_epochs_differ() -> None:
    stream = Stream(TEXT, 10, seed=3)
    epochs = [_starts(stream, e * stream.samples, (e + 1) * stream.samples) for e in range(3)]
    assert stream.samples == 25
    assert all(sorted(epoch) == list(range(0, 250, 10)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert _starts(Stream(TEXT, 10, seed=4), 0, 25) != epochs[0]


def test_a_window_is_a_run_of_bytes_with_the_last_target() -> None:
    window = Stream(TEXT, 10, seed=3).windows(0, 1)[0]
    assert len(window) == 11
    assert all(b - a == 1 for a, b in pairwise(window.tolist()))


@settings(deadline=None)
@given(st.integers(0, 2**31), st.integers(0, 200), st.integers(0, 80))
def test_the_order_is_the_one_that_the_format_describes(seed: int, first: int, count: int) -> None:
    stream = Stream(TEXT, 10, seed)
    expected = [permuted(cursor % 25, 25, seed, cursor // 25) for cursor in range(first, first + count)]
    assert stream.windows_at(first, first + count).tolist() == expected


def test_windows_may_span_epochs() -> None:
    stream = Stream(TEXT, 10, seed=3)
    assert _starts(stream, 20, 30) == _starts(stream, 20, 25) + _starts(stream, 25, 30)


phases = st.lists(
    st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(1, 6), st.integers(1, 4)), min_size=1, max_size=5
)


@given(phases)
def test_ranks_restarts_and_phases_neither_repeat_nor_skip(runs: list[tuple[int, int, int, int]]) -> None:
    """Each run has its own ranks, micro-batches and width, like phases and restarts."""
    seen: list[int] = []
    cursor = 0
    for ranks, micro_batches, width, steps in runs:
        batch = Batch(sequences=width * micro_batches, micro_batches=micro_batches)
        for _ in range(steps):
            parts = [rank_parts(batch, cursor, rank, ranks) for rank in range(ranks)]
            for micro in range(micro_batches):
                sizes = [end - first for first, end in (part[micro] for part in parts)]
                assert max(sizes) - min(sizes) <= 1, "as even as possible"
                seen += [c for part in parts for c in range(*part[micro])]
            cursor += batch.sequences
    assert seen == list(range(cursor))


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_an_epoch_over_ranks_is_the_text(ranks: int) -> None:
    stream, batch = Stream(TEXT, 10, seed=3), Batch(sequences=5)
    starts = [
        start
        for cursor in range(0, 25, 5)
        for rank in range(ranks)
        for first, end in rank_parts(batch, cursor, rank, ranks)
        for start in _starts(stream, first, end)
    ]
    assert sorted(starts) == list(range(0, 250, 10))

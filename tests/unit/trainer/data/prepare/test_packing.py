"""Best-fit packing, and its effect on training."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from pseudoreal_trainer.data.documents import has_target
from pseudoreal_trainer.data.prepare.packing import best_fit

END = 0
lengths_and_row = st.tuples(st.lists(st.integers(1, 70), max_size=60), st.integers(2, 24))


def _laid_out(lengths: list[int], sequence: int) -> list[tuple[int | None, int]]:
    """Return the documents in packed order, None for padding, each with the position of its first token."""
    places: list[tuple[int | None, int]] = []
    at = 0
    for block in best_fit(lengths, sequence):
        for document in block.order():
            places.append((document, at))
            at += 1 if document is None else lengths[document]
        assert at % sequence == 0
    return places


@settings(deadline=None)
@given(lengths_and_row)
def test_each_document_is_there_once_and_cut_as_seldom_as_can_be(case: tuple[list[int], int]) -> None:
    lengths, sequence = case
    placed = {document: begin for document, begin in _laid_out(lengths, sequence) if document is not None}
    assert sorted(placed) == [*range(len(lengths))]
    for document, begin in placed.items():
        length = lengths[document]
        rows = (begin + length - 1) // sequence - begin // sequence + 1
        assert rows == -(-length // sequence)


@settings(deadline=None)
@given(lengths_and_row)
def test_packing_is_best_fit_decreasing(case: tuple[list[int], int]) -> None:
    """A slow reference that searches every block gives blocks with the same room."""
    lengths, sequence = case
    rooms: list[int] = []
    for size in sorted((length % sequence for length in lengths), reverse=True):
        fitting = [room for room in rooms if room >= size > 0]
        if fitting:
            rooms.remove(min(fitting))
        rooms.append(min(fitting, default=sequence) - size if size else 0)
    assert sorted(block.room for block in best_fit(lengths, sequence)) == sorted(rooms)


def test_documents_of_all_lengths_need_little_padding() -> None:
    """Log-normal lengths like those of web pages; books; and the hardest case, documents that are all slightly longer
    than a row."""
    random = np.random.default_rng(3)
    pages = np.maximum(1, random.lognormal(6.3, 1.1, 5000)).astype(int).tolist()
    books = random.integers(3000, 90_000, 400).tolist()
    little_longer = random.integers(2100, 2700, 400).tolist()
    for lengths, most in ((pages, 0.0005), (books, 0.002), (little_longer, 0.02)):
        assert sum(block.room for block in best_fit(lengths, 2048)) <= most * sum(lengths)


@settings(deadline=None)
@given(lengths_and_row)
def test_training_counts_no_loss_for_padding_and_all_else_once(case: tuple[list[int], int]) -> None:
    """The windows read in training, with masked documents, contain every target of every document once."""
    lengths, sequence = case
    tokens: list[int] = []
    for document, _ in _laid_out(lengths, sequence):
        tokens += [END] if document is None else [document + 1] * (lengths[document] - 1) + [END]
    tokens += [END] * sequence  # so that the last row is read, as if more followed
    count = (len(tokens) - 1) // sequence
    windows = np.array([tokens[row * sequence : (row + 1) * sequence + 1] for row in range(count)], dtype=np.int32)
    if not count:
        return
    inputs, targets, counts = windows[:, :-1], windows[:, 1:], has_target(windows, END)
    for document, length in enumerate(lengths, start=1):
        assert ((inputs == document) & counts).sum() == length - 1
    assert counts.sum() == sum(length - 1 for length in lengths)
    assert ((targets == inputs) | (targets == END) | ~counts).all()
    numbers = (inputs == END).cumsum(axis=1) - (inputs == END)
    for document, length in enumerate(lengths, start=1):
        rows, columns = np.nonzero(inputs == document)
        pieces = {(row, numbers[row, column]) for row, column in zip(rows.tolist(), columns.tolist(), strict=True)}
        assert length <= 1 or len(pieces) <= -(-length // sequence)

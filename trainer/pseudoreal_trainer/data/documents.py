"""Statistics of documents within windows: the divisor of a step's loss, and the attention pairs. Pure.

A document ends with the end-of-document token, and the next document starts right after it. Boundaries are therefore
visible in the tokens, without an index of documents. A window may cut documents at both ends: its position 0 counts as
the start of a document, even if it continues a document of the window before. The last token of a document has no
target: the first token of the next document does not follow from it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pseudoreal_trainer.data.tokens.reader import Tokens

Window = int | None
"""Attention window in tokens; None: all earlier tokens."""


@dataclass(frozen=True)
class Counts:
    """Counts over the documents of some windows. Counts of several ranks add up."""

    targets: int
    """Number of targets that are not ignored."""
    twice_the_pairs: Mapping[Window, int]
    """Attention window of a layer -> twice the approximate number of (query, key) pairs: L * L for a document of L
    tokens without a window."""

    def __add__(self, other: "Counts") -> "Counts":
        pairs = {window: count + other.twice_the_pairs[window] for window, count in self.twice_the_pairs.items()}
        return Counts(self.targets + other.targets, pairs)


def count_documents(windows: Tokens, end: int, sizes: Iterable[Window]) -> Counts:
    """Return the counts of windows, [n, T + 1], for layers with attention windows of these sizes. `end`: the token that
    ends documents."""
    lengths = document_lengths(windows, end)
    seen = {window: np.minimum(lengths, lengths if window is None else window) for window in sizes}
    pairs = {window: int((most * (2 * lengths - most)).sum()) for window, most in seen.items()}
    return Counts(int(has_target(windows, end).sum()), pairs)


def document_lengths(windows: Tokens, end: int) -> NDArray[np.int64]:
    """Return the lengths in tokens of all documents, or parts of documents, in the inputs of the windows, in order: [n,
    T + 1] -> [documents]."""
    begins = np.ones((len(windows), windows.shape[1] - 1), np.bool_)
    begins[:, 1:] = windows[:, :-2] == end
    return np.diff(np.flatnonzero(begins), append=begins.size)


def has_target(windows: Tokens, end: int) -> NDArray[np.bool_]:
    """Return a mask of the inputs that have a target: [n, T + 1] -> [n, T]."""
    found: NDArray[np.bool_] = windows[:, :-1] != end
    return found

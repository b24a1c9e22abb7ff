"""Documents within windows, counted: what a step's loss is divided by, and how much its tokens attend to. Pure.

A document ends with the end-of-document token, and the next one begins behind it; so borders are in the tokens, and no
index of documents is needed. A document that a window cuts begins, or goes on, at position 0 there. The last token of
a document has no target: the first token of the next one does not follow from it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pseudoreal_trainer.data.tokens.reader import Tokens

Window = int | None
"""Tokens that a token attends to; None: all before it."""


@dataclass(frozen=True)
class Counts:
    """Numbers of some windows' documents. Those of several ranks add up."""

    targets: int
    """Targets that are not ignored."""
    twice_the_pairs: Mapping[Window, int]
    """Twice the number of pairs of tokens one of which attends to the other, in layers with each of these windows, as
    operations are counted: L * L for a document of L tokens, without a window."""

    def __add__(self, other: "Counts") -> "Counts":
        pairs = {window: count + other.twice_the_pairs[window] for window, count in self.twice_the_pairs.items()}
        return Counts(self.targets + other.targets, pairs)


def count_documents(windows: Tokens, end: int, sizes: Iterable[Window]) -> Counts:
    """Counts of windows, [n, T + 1], whose documents end with the token `end`, for layers with windows of these
    sizes."""
    lengths = document_lengths(windows, end)
    seen = {window: np.minimum(lengths, lengths if window is None else window) for window in sizes}
    pairs = {window: int((most * (2 * lengths - most)).sum()) for window, most in seen.items()}
    return Counts(int(has_target(windows, end).sum()), pairs)


def document_lengths(windows: Tokens, end: int) -> NDArray[np.int64]:
    """Tokens of the parts of documents among the inputs of all windows, [n, T + 1], one window behind the other."""
    begins = np.ones((len(windows), windows.shape[1] - 1), np.bool_)
    begins[:, 1:] = windows[:, :-2] == end
    return np.diff(np.flatnonzero(begins), append=begins.size)


def has_target(windows: Tokens, end: int) -> NDArray[np.bool_]:
    """Whether the token behind each input follows from it: [n, T + 1] -> [n, T]."""
    found: NDArray[np.bool_] = windows[:, :-1] != end
    return found

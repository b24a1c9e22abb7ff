"""Documents within windows: numbers, positions and targets that respect their borders. Pure.

A document ends with the end-of-document token, and the next one begins behind it; so borders are in the tokens, and no
index of documents is needed. A document that a window cuts begins, or goes on, at position 0 there. The last token of
a document has no target: the first token of the next one does not follow from it.
"""

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from pseudoreal_trainer.data.tokens.reader import Tokens

IGNORED = -100
"""A target that is none, as torch's cross entropy has it."""
_PORTION = 1 << 22
"""Tokens that are in memory at a time to be counted."""

Flags = NDArray[np.bool_]


class Windows(Protocol):
    """Samples by their cursors."""

    @property
    def sequence(self) -> int: ...

    def windows(self, first: int, end: int) -> NDArray[Any]:
        """The samples first..end-1, [end - first, sequence + 1]."""


def document_numbers(windows: Tokens, end: int) -> Tokens:
    """Number of each input token's document in its window, from 0: [n, T + 1] -> [n, T]. `end`: the end-of-document
    token."""
    return _begins(windows, end).cumsum(1, dtype=np.int32) - np.int32(1)


def positions(windows: Tokens, end: int) -> Tokens:
    """Place of each input token in its document, from 0: [n, T + 1] -> [n, T]."""
    begins = _begins(windows, end)
    places = np.arange(begins.shape[1], dtype=np.int32)
    return places - np.maximum.accumulate(np.where(begins, places, np.int32(0)), axis=1)


def targets(windows: Tokens, end: int) -> Tokens:
    """The token behind each input token, and IGNORED behind the end of a document: [n, T + 1] -> [n, T]."""
    return np.where(windows[:, :-1] == end, np.int32(IGNORED), windows[:, 1:])


def borders(windows: Tokens, end: int) -> Tokens:
    """Cumulative lengths of the parts of documents in all windows, one window behind the other: [parts + 1], from 0 to
    n T, as attention over sequences of various lengths wants them."""
    begins = np.flatnonzero(_begins(windows, end))
    return np.append(begins, windows[:, :-1].size).astype(np.int32)


def count_targets(stream: Windows, first: int, end: int, end_of_document: int) -> int:
    """Number of targets that are not ignored in the samples first..end-1. A function of the cursors alone: every rank
    can know what a whole step is divided by."""
    portion = max(1, _PORTION // stream.sequence)
    parts = [(begin, min(end, begin + portion)) for begin in range(first, end, portion)]
    return sum(int((stream.windows(*part)[:, :-1] != end_of_document).sum()) for part in parts)


def _begins(windows: Tokens, end: int) -> Flags:
    """Whether a document, or the rest of one, begins at each input token, [n, T]."""
    begins = np.ones((len(windows), windows.shape[1] - 1), np.bool_)
    begins[:, 1:] = windows[:, :-2] == end
    return begins

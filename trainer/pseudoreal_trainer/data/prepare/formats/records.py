"""Records of an input: documents that are parsed on access, so that a resumed run can skip the documents that are in
its shards already."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Text = Iterable[str]
"""The text of a document in pieces, so that it need not be in memory as a whole."""
Ids = NDArray[np.integer]
"""A tokenized document, [n]; the last token may be the end-of-document token."""


class Malformed(ValueError):
    """A document cannot be used; the text says why."""


@dataclass(frozen=True, slots=True)
class Mark:
    """Place between two records of an input, from which reading can go on."""

    number: int = 0
    """Lines or rows before it."""
    byte: int = 0
    """Bytes before it; 0 for rows."""


START = Mark()


@dataclass(frozen=True, slots=True)
class Record:
    place: str
    """Location in the input, such as "line 17"."""
    position: int
    """Bytes of the input read up to this record; an estimate for records of unknown size."""
    content: Callable[[], Text | Ids]
    """Returns the document. Calling it, or iterating over the text, raises Malformed."""
    end: Mark | None = None
    """Place after the record; None: the records after it can be read from the start of the input alone."""

"""Documents of an input, one after the other, each parsed only when it is asked for: a run that goes on passes over
those that it has already."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Text = Iterable[str]
"""The text of a document in pieces, so that it need not be in memory as a whole."""
Ids = NDArray[np.integer]
"""A document that is tokens already, [n]; the token that ends documents may be its last."""


class Malformed(ValueError):
    """A document cannot be used; the text says why."""


@dataclass(frozen=True, slots=True)
class Record:
    place: str
    """Where it is in the input, as "line 17"."""
    position: int
    """Bytes of the input that were read when it was met."""
    content: Callable[[], Text | Ids]
    """The document. Calling it, or taking its pieces, raises Malformed."""

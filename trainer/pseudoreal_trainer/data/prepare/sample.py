"""A sample of the inputs' text, for training a tokenizer."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from pseudoreal_trainer.data.prepare.encoding import Faults
from pseudoreal_trainer.data.prepare.formats.records import Malformed, Record
from pseudoreal_trainer.data.prepare.inputs import Input
from pseudoreal_trainer.errors import InvalidJobError

_MOST_MALFORMED = 100
"""Maximum number of malformed documents in an input. With more, the input is assumed not to be in the expected
format, and is rejected."""


def sampled_texts(inputs: Sequence[Input], field: str, most_bytes: int, tick: Callable[[int], None]) -> Iterator[str]:
    """Yield texts of about `most_bytes` in all: the start of each input, in proportion to its size. `tick` is called
    with the bytes so far. Raises InvalidJobError for an input that is not text."""
    size, taken = max(1, sum(each.size for each in inputs)), 0
    for each in inputs:
        left = max(1, most_bytes * each.size // size)
        for text in _texts(each, field):
            content = text.encode(errors="replace")[:left]
            # A character that the cut divides is left out.
            if part := content.decode(errors="ignore"):
                yield part
            left -= len(content)
            taken += len(content)
            tick(taken)
            if not left:
                break


def _texts(source: Input, field: str) -> Iterator[str]:
    faults = Faults(_MOST_MALFORMED)
    for record in source.records(field, end_of_document=0):
        try:
            yield from _pieces(source, record)
        except Malformed as error:
            faults.add(f"{source.name} {record.place}", error)


def _pieces(source: Input, record: Record) -> Iterator[str]:
    content = record.content()
    if isinstance(content, np.ndarray):
        raise InvalidJobError(f"{source.path} holds tokens, and a tokenizer is trained on text; leave it out")
    yield from content

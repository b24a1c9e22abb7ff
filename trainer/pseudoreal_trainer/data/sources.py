"""Samples of a mixture of sources: what a rank reads of the order that `order` says."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from pseudoreal_trainer.data.order import Stretch
from pseudoreal_trainer.data.stream import Indices, shuffled, spread_starts
from pseudoreal_trainer.data.tokens.reader import TokenReader, Tokens
from pseudoreal_trainer.data.tokens.runs import TokenFiles
from pseudoreal_trainer.errors import InvalidJobError


@dataclass(frozen=True)
class Source:
    """Token files as samples: windows of `sequence` tokens that do not overlap, each with the token behind it, the
    target of its last position."""

    name: str
    reader: TokenReader
    sequence: int
    seed: int

    @property
    def samples(self) -> int:
        """Samples of an epoch."""
        return (self.reader.tokens - 1) // self.sequence

    def windows(self, numbers: Indices) -> Tokens:
        """The samples with these numbers, counted over all epochs, [len(numbers), sequence + 1]."""
        places = shuffled(numbers, self.samples, self.seed, _key(self.name))
        return self.reader.windows(places * self.sequence, self.sequence + 1)

    def spread(self, most: int) -> Tokens:
        """At most `most` windows, spread evenly over the files, in their order: for validation, [W, sequence + 1]."""
        return self.reader.windows(spread_starts(self.reader.tokens, self.sequence, most), self.sequence + 1)


@dataclass(frozen=True)
class MixedStream:
    """The samples of one phase."""

    stretch: Stretch
    sources: Mapping[str, Source]
    sequence: int

    def windows(self, first: int, end: int) -> Tokens:
        """The samples at the cursors first..end-1, [end - first, sequence + 1]."""
        found = np.empty((end - first, self.sequence + 1), np.int32)
        origins, numbers = self.stretch.locate(first, end)
        for origin in np.unique(origins).tolist():
            rows = origins == origin
            found[rows] = self.sources[self.stretch.names[origin]].windows(numbers[rows])
        return found


def open_source(name: str, files: TokenFiles, *, sequence: int, vocabulary: int, seed: int) -> Source:
    """The source of that name. `vocabulary`: tokens that the model knows. Raises InvalidJobError where the files have
    tokens that it does not know, or too few for a sample, and where they are packed for another length."""
    if files.vocabulary is not None and files.vocabulary > vocabulary:
        raise InvalidJobError(
            f"the source {name} has a vocabulary of {files.vocabulary:,}, and the model's is {vocabulary:,}: prepare"
            " the files with the job's tokenizer, or raise the model's vocabulary"
        )
    if files.sequence not in (None, sequence):
        raise InvalidJobError(
            f"the documents of the source {name} are packed into rows of {files.sequence:,} tokens, and"
            f" model.sequenceLength is {sequence:,}, so samples would cut what is packed together; set"
            f" model.sequenceLength to {files.sequence:,}, or prepare the files with --pack best-fit {sequence}"
        )
    if files.tokens <= sequence:
        raise InvalidJobError(
            f"the source {name} has {files.tokens:,} tokens, and one sample needs model.sequenceLength + 1 ="
            f" {sequence + 1:,}: add text, or lower model.sequenceLength"
        )
    return Source(name, TokenReader(files, vocabulary), sequence, seed)


def _key(name: str) -> int:
    """Gives sources of the same size orders of their own."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")

"""Samples of a mixture of sources: locates the samples of each step, in the order that `data.order` defines, and reads
them."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pseudoreal_trainer.data.block_order import BlockOrder, groups_of, order_of_objects, shuffled_by_blocks
from pseudoreal_trainer.data.order import PhaseSamples
from pseudoreal_trainer.data.stream import Indices, Part, shuffled, spread_starts
from pseudoreal_trainer.data.tokens.ranges import MOST_OPEN_IN_ALL, Blocks, FileReader, ObjectReader, RangeReader
from pseudoreal_trainer.data.tokens.reader import TokenReader, Tokens, are_objects
from pseudoreal_trainer.data.tokens.runs import TokenFiles
from pseudoreal_trainer.errors import InvalidJobError


@dataclass(frozen=True)
class Source:
    """Token files as samples: windows of `sequence` + 1 tokens, one from each multiple of `sequence` on. The last token
    of a window is only a target; it is the first input of the next window."""

    name: str
    reader: TokenReader
    sequence: int
    seed: int
    order: BlockOrder | None = None
    """Block-wise order of the windows; None: a single shuffle of all windows."""

    @property
    def samples(self) -> int:
        """Number of samples in an epoch."""
        return (self.reader.tokens - 1) // self.sequence

    def windows(self, numbers: Indices) -> Tokens:
        """Return the samples with these numbers, counted over all epochs, [len(numbers), sequence + 1]."""
        return self.read(numbers, self.places(numbers))

    def places(self, numbers: Indices) -> Indices:
        """Return the window indices of the samples with these numbers, [len(numbers)]."""
        key = _key(self.name)
        if self.order is None:
            return shuffled(numbers, self.samples, self.seed, key)
        return shuffled_by_blocks(numbers, self.samples, self.order, self.seed, key)

    def read(self, numbers: Indices, places: Indices) -> Tokens:
        """Return the samples with these numbers and the window indices `places`, [len(numbers), sequence + 1]."""
        if self.order is None:
            return self._at(places)
        found = np.empty((len(numbers), self.sequence + 1), np.int32)
        # Group by group, because the cache holds the blocks of one group.
        for rows, _, _ in groups_of(numbers, self.samples, self.order):
            found[rows] = self._at(places[rows])
        return found

    def _at(self, places: Indices) -> Tokens:
        return self.reader.windows(places * self.sequence, self.sequence + 1)

    def spread(self, most: int) -> Tokens:
        """Return at most `most` windows for validation, spread evenly over the files, in file order, [W, sequence +
        1]."""
        return self.reader.windows(spread_starts(self.reader.tokens, self.sequence, most), self.sequence + 1)


@dataclass(frozen=True)
class Places:
    """Locations of samples of a phase."""

    origins: Indices
    """Source of each sample, as an index into the names of the mixture, [n]."""
    numbers: Indices
    """Number of each sample among all samples of its source, [n]."""
    windows: Indices
    """Window index of each sample in its source, [n]."""

    def part(self, first: int, end: int) -> "Places":
        return Places(self.origins[first:end], self.numbers[first:end], self.windows[first:end])


@dataclass(frozen=True)
class MixedStream:
    """The samples of one phase."""

    phase: PhaseSamples
    sources: Mapping[str, Source]
    sequence: int

    def windows(self, first: int, end: int) -> Tokens:
        """Return the samples at the cursors first..end-1, [end - first, sequence + 1]."""
        return self.read(self.places(np.arange(first, end)))

    def places(self, cursors: Indices) -> Places:
        """Return the locations of the samples at these cursors, without reading them."""
        origins, numbers = self.phase.locate(cursors)
        found = np.empty(len(cursors), np.int64)
        for source, rows in self._by_source(origins):
            found[rows] = source.places(numbers[rows])
        return Places(origins, numbers, found)

    def read(self, places: Places) -> Tokens:
        """Return the samples at these locations, [n, sequence + 1]."""
        found = np.empty((len(places.origins), self.sequence + 1), np.int32)
        for source, rows in self._by_source(places.origins):
            found[rows] = source.read(places.numbers[rows], places.windows[rows])
        return found

    def _by_source(self, origins: Indices) -> Iterator[tuple[Source, NDArray[np.bool_]]]:
        """Yield each source of the samples, with the mask of its samples."""
        for origin in np.unique(origins).tolist():
            yield self.sources[self.phase.names[origin]], origins == origin


AT_ONCE = 4096
"""Maximum number of samples located in one call, in whole steps; a larger step is located alone."""

Step = Mapping[Part, Places]


class StepOrder:
    """Locations of the samples of consecutive steps. Each step is requested once, in order.

    A numpy call takes as long for one number as for a thousand, and the keyed permutation makes about a hundred calls.
    The samples of many steps are therefore located at once.
    """

    def __init__(self, stream: MixedStream, parts: Callable[[int], Sequence[Part]], stride: int) -> None:
        """`parts`: returns the rank's parts of the step that starts at a cursor. `stride`: distance between the
        cursors of two steps."""
        self._stream, self._parts, self._stride = stream, parts, stride
        self._located: dict[int, Step] = {}

    def step(self, cursor: int) -> Step:
        """Return the locations of the samples of the step that starts at `cursor`."""
        if cursor not in self._located:
            self._located = dict(self._locate(cursor))
        return self._located.pop(cursor)

    def _locate(self, first: int) -> Iterator[tuple[int, Step]]:
        """Yield the steps from the cursor `first` on, with their cursors."""
        own = sum(end - begin for begin, end in self._parts(first))
        count = max(1, AT_ONCE // max(1, own))
        steps = {cursor: self._parts(cursor) for cursor in range(first, first + count * self._stride, self._stride)}
        cursors = [np.arange(*part) for parts in steps.values() for part in parts]
        found, begin = self._stream.places(np.concatenate(cursors)), 0
        for cursor, parts in steps.items():
            step = dict[Part, Places]()
            for part in parts:
                end = begin + part[1] - part[0]
                step[part], begin = found.part(begin, end), end
            yield cursor, step


def open_source(
    name: str, files: TokenFiles, *, sequence: int, vocabulary: int, seed: int, ranks: int = 1, sources: int = 1
) -> Source:
    """Open the source `name`. Raises InvalidJobError if the files state a larger vocabulary, have too few tokens for a
    sample, or are packed for another length.

    `vocabulary`: number of tokens that the model knows. `ranks`: data ranks that share the samples; affects only the
    sizes of requests. `sources`: number of all sources, which share the limit of open files.
    """
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
    if not are_objects(files.runs):
        ranges: RangeReader = FileReader(files.runs, max(1, MOST_OPEN_IN_ALL // sources))
        return Source(name, TokenReader(files, vocabulary, ranges), sequence, seed)
    order = order_of_objects(sequence * files.dtype.itemsize)
    ranges = ObjectReader(files.runs, blocks_of(order, sequence, files.dtype.itemsize, ranks))
    return Source(name, TokenReader(files, vocabulary, ranges), sequence, seed, order)


def blocks_of(order: BlockOrder, sequence: int, width: int, ranks: int) -> Blocks:
    """Return the blocks in which a rank requests the windows of an order, for tokens of `width` bytes.

    A single rank needs all windows of a block. Each of several ranks needs only its part, so it requests proportionally
    less at a time. The cache keeps the rest of a group and the windows after the last whole block, which belong to the
    last group.
    """
    windows = max(1, order.windows // ranks)
    most = (order.size + order.windows) * (sequence + 1) * width
    return Blocks(windows * sequence * width, overlap=width, most=most)


def _key(name: str) -> int:
    """Return a key from the source's name, so that sources of the same size have different orders."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")

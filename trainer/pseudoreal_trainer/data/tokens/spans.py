"""Bytes from many places of many files: from a file system, or from object storage through a bounded cache.

Files are read instead of mapped. A read brings a whole window with one request, where a map has a page fault for each
page. A read reports a truncated file as an error, where a map kills the process (SIGBUS). And bytes that are read do
not count as memory of the process.
"""

import os
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple, Protocol

from pseudoreal_trainer.data.tokens.runs import Run
from pseudoreal_trainer.errors import TrainingError
from pseudoreal_trainer.storage.objects import read_ranges
from pseudoreal_trainer.storage.path import ObjectPath

MOST_OPEN_IN_ALL = 512
"""Most open files of all sources: systems allow a process at least 1,024 descriptors of all kinds."""
_MOST_OPEN = 64
"""Most open files of one source."""
_ANNOUNCED = 64
"""Number of uncached spans announced to the system before the first of them is read: a disk serves many requests
concurrently."""
_MOST_REQUESTED = 16 << 20
"""Bytes of blocks requested at a time; at least one block."""


class Blocks(NamedTuple):
    """Cutting of objects into blocks, which are requested and cached whole. Blocks are counted over all runs as if
    these were contiguous, so that they can coincide with the blocks of a window order."""

    size: int = 64 << 10
    """Bytes from one block to the next. In a random order almost no two windows share a block, so blocks are little
    larger than windows."""
    overlap: int = 0
    """Bytes of the next block that a block includes: the target of its last window."""
    most: int = 8 << 20
    """Bytes of blocks that are cached, per source."""


class Span(NamedTuple):
    run: int
    """Number of the run."""
    begin: int
    """First byte in the run's file."""
    at: int
    """First byte in the target buffer."""
    size: int


class SpanReader(Protocol):
    """Used by one thread at a time."""

    def read_into(self, spans: Sequence[Span], buffer: memoryview) -> None:
        """Fill the buffer's bytes named by the spans. Raises TrainingError if a file is missing, too short, or
        unreadable."""

    def close(self) -> None: ...


class FileSpans:
    """Spans of files. A file is opened at its first read; the least recently used file is closed to make room."""

    def __init__(self, runs: Sequence[Run], most_open: int = MOST_OPEN_IN_ALL) -> None:
        self._runs, self._most_open = runs, min(most_open, _MOST_OPEN)
        self._descriptors: OrderedDict[int, int] = OrderedDict()

    def read_into(self, spans: Sequence[Span], buffer: memoryview) -> None:
        missing = [span for span in spans if not self._read_from_memory(span, buffer)]
        for first in range(0, len(missing), _ANNOUNCED):
            portion = missing[first : first + _ANNOUNCED]
            for run, begin, _, size in portion:
                os.posix_fadvise(self._descriptor(run), begin, size, os.POSIX_FADV_WILLNEED)
            for span in portion:
                self._read(span, buffer)

    def _read_from_memory(self, span: Span, buffer: memoryview) -> bool:
        """Read the span from the system's page cache. Return False if not all of it is cached, or the file system
        cannot tell."""
        run, begin, at, size = span
        try:
            return os.preadv(self._descriptor(run), [buffer[at : at + size]], begin, os.RWF_NOWAIT) == size
        except OSError:
            return False

    def _read(self, span: Span, buffer: memoryview) -> None:
        run, begin, at, size = span
        done = 0
        while done < size:
            try:
                count = os.preadv(self._descriptor(run), [buffer[at + done : at + size]], begin + done)
            except OSError as error:
                raise TrainingError(f"{self._runs[run].file} of the token files cannot be read: {error}") from error
            # A read may return fewer bytes than requested. Only at the end of the file it returns none.
            if count == 0:
                raise _too_short(self._runs[run])
            done += count

    def _descriptor(self, run: int) -> int:
        found = self._descriptors.get(run)
        if found is None:
            if len(self._descriptors) == self._most_open:
                os.close(self._descriptors.popitem(last=False)[1])
            found = self._descriptors[run] = _opened(self._runs[run])
        self._descriptors.move_to_end(run)
        return found

    def close(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])


def _opened(run: Run) -> int:
    try:
        descriptor = os.open(str(run.file), os.O_RDONLY)
    except FileNotFoundError as error:
        raise _missing(run) from error
    except OSError as error:
        raise TrainingError(f"{run.file} of the token files cannot be opened: {error}") from error
    if os.fstat(descriptor).st_size != run.end:
        os.close(descriptor)
        raise _too_short(run)
    # Windows are read in random order: read-ahead would be wasted.
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
    return descriptor


_Block = tuple[int, int]
"""Number of a run, and number of a block that overlaps it."""


class ObjectSpans:
    """Spans of objects. Blocks that are not cached are requested concurrently."""

    def __init__(self, runs: Sequence[Run], blocks: Blocks | None = None) -> None:
        self._runs, self._cut = runs, blocks or Blocks()
        self._firsts = [0, *accumulate(run.end - run.begin for run in runs)]
        """For each run, the bytes of all runs before it."""
        self._blocks: OrderedDict[_Block, bytes] = OrderedDict()
        self._kept = 0
        """Bytes of all cached blocks."""

    def read_into(self, spans: Sequence[Span], buffer: memoryview) -> None:
        for portion in self._portions(spans):
            self._fetch([block for span in portion for block in self._blocks_of(span)])
            for span in portion:
                buffer[span.at : span.at + span.size] = self._joined(span)
            while self._kept > self._cut.most:
                self._kept -= len(self._blocks.popitem(last=False)[1])

    def _portions(self, spans: Sequence[Span]) -> Iterator[list[Span]]:
        """Yield parts of the spans whose blocks are requested together."""
        portion: list[Span] = []
        count = 0
        for span in spans:
            needed = len(self._blocks_of(span))
            if portion and (count + needed) * self._cut.size > _MOST_REQUESTED:
                yield portion
                portion, count = [], 0
            portion.append(span)
            count += needed
        if portion:
            yield portion

    def _fetch(self, blocks: list[_Block]) -> None:
        missing = [block for block in dict.fromkeys(blocks) if block not in self._blocks]
        for block, content in zip(missing, self._downloaded(missing), strict=True):
            self._blocks[block] = content
            self._kept += len(content)
        for block in blocks:
            self._blocks.move_to_end(block)

    def _downloaded(self, blocks: list[_Block]) -> list[bytes]:
        ranges = [(*self._range(*block), self._runs[block[0]]) for block in blocks]
        try:
            contents = read_ranges([(_object(run), begin, end) for begin, end, run in ranges])
        except FileNotFoundError as error:
            raise TrainingError(f"an object of the token files is not there any more: {error}; restore it") from error
        for (begin, end, run), content in zip(ranges, contents, strict=True):
            if len(content) != end - begin:
                raise _too_short(run)
        return contents

    def _range(self, run: int, number: int) -> tuple[int, int]:
        """Return the first byte, in the run's file, of its part of a block, and the offset after its last byte."""
        first, header = self._firsts[run], self._runs[run].begin
        end = (number + 1) * self._cut.size + self._cut.overlap
        return max(number * self._cut.size, first) - first + header, min(end, self._firsts[run + 1]) - first + header

    def _blocks_of(self, span: Span) -> list[_Block]:
        begin = self._place(span)
        first, last = (byte // self._cut.size for byte in (begin, begin + span.size - 1 - self._cut.overlap))
        return [(span.run, number) for number in range(first, max(first, last) + 1)]

    def _place(self, span: Span) -> int:
        """Return the span's first byte, counted over all runs."""
        return self._firsts[span.run] + span.begin - self._runs[span.run].begin

    def _joined(self, span: Span) -> bytes:
        """Return the span's bytes, joined from its blocks without their overlaps."""
        pieces, byte, end = [], span.begin, span.begin + span.size
        for block in self._blocks_of(span):
            begin, _ = self._range(*block)
            pieces.append(self._blocks[block][byte - begin : end - begin])
            byte += len(pieces[-1])
        return b"".join(pieces)

    def close(self) -> None:
        self._blocks.clear()
        self._kept = 0


def _object(run: Run) -> ObjectPath:
    assert isinstance(run.file, ObjectPath)
    return run.file


def _missing(run: Run) -> TrainingError:
    return TrainingError(f"{run.file} of the token files is not there any more: restore it")


def _too_short(run: Run) -> TrainingError:
    return TrainingError(
        f"{run.file} of the token files has not the {run.end:,} bytes that it had when training began, or that its"
        " index names: somebody writes there; restore it"
    )

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
from pseudoreal_trainer.portable import read_at
from pseudoreal_trainer.storage.objects import read_ranges
from pseudoreal_trainer.storage.path import ObjectPath

MOST_OPEN_IN_ALL = 512
"""Maximum number of open files of all sources: systems allow a process at least 1,024 descriptors of all kinds."""
_MOST_OPEN = 64
"""Maximum number of open files of one source."""
_ANNOUNCED = 64
"""Number of uncached ranges announced to the system before the first of them is read: a disk serves many requests
concurrently."""
_HAS_ADVICE = hasattr(os, "posix_fadvise") and hasattr(os, "RWF_NOWAIT")
"""Whether the system takes announcements of reads, and reads from its page cache alone: Linux does."""
_MOST_REQUESTED = 16 << 20
"""Bytes of blocks requested at a time; at least one block."""


class Blocks(NamedTuple):
    """How objects are cut into blocks. Blocks are requested and cached as a whole. Blocks are numbered over all runs as
    if the runs were contiguous, so that blocks can coincide with the blocks of a window order."""

    size: int = 64 << 10
    """Bytes from the start of one block to the start of the next. In a random order almost no two windows share a
    block, so blocks are little larger than windows."""
    overlap: int = 0
    """Bytes of the next block that a block includes: the target of its last window."""
    most: int = 8 << 20
    """Bytes of blocks that are cached, per source."""


class ByteRange(NamedTuple):
    run: int
    """Index of the run."""
    begin: int
    """First byte in the run's file."""
    at: int
    """First byte in the target buffer."""
    size: int


class RangeReader(Protocol):
    """Reader of byte ranges. Used by one thread at a time."""

    def read_into(self, ranges: Sequence[ByteRange], buffer: memoryview) -> None:
        """Read each range into its place in `buffer`. Raises TrainingError if a file is missing, too short, or
        unreadable."""

    def close(self) -> None: ...


class FileReader:
    """Reader of ranges of files. A file is opened at its first read; the least recently used file is closed to make
    room."""

    def __init__(self, runs: Sequence[Run], most_open: int = MOST_OPEN_IN_ALL) -> None:
        self._runs, self._most_open = runs, min(most_open, _MOST_OPEN)
        self._descriptors: OrderedDict[int, int] = OrderedDict()

    def read_into(self, ranges: Sequence[ByteRange], buffer: memoryview) -> None:
        missing = [byte_range for byte_range in ranges if not self._read_from_memory(byte_range, buffer)]
        for first in range(0, len(missing), _ANNOUNCED):
            portion = missing[first : first + _ANNOUNCED]
            if _HAS_ADVICE:
                for run, begin, _, size in portion:
                    os.posix_fadvise(self._descriptor(run), begin, size, os.POSIX_FADV_WILLNEED)
            for byte_range in portion:
                self._read(byte_range, buffer)

    def _read_from_memory(self, byte_range: ByteRange, buffer: memoryview) -> bool:
        """Read a range from the system's page cache. Return False if a part of the range is not cached, or the system
        or file system cannot tell."""
        if not _HAS_ADVICE:
            return False
        run, begin, at, size = byte_range
        try:
            return os.preadv(self._descriptor(run), [buffer[at : at + size]], begin, os.RWF_NOWAIT) == size
        except OSError:
            return False

    def _read(self, byte_range: ByteRange, buffer: memoryview) -> None:
        run, begin, at, size = byte_range
        done = 0
        while done < size:
            try:
                count = read_at(self._descriptor(run), buffer[at + done : at + size], begin + done)
            except OSError as error:
                raise TrainingError(f"{self._runs[run].file} of the token files cannot be read: {error}") from error
            # A read may return fewer bytes than requested; it returns 0 only at the end of the file.
            if count == 0:
                raise _too_short(self._runs[run])
            done += count

    def _descriptor(self, run: int) -> int:
        found = self._descriptors.get(run)
        if found is None:
            if len(self._descriptors) == self._most_open:
                os.close(self._descriptors.popitem(last=False)[1])
            found = self._descriptors[run] = _open_file(self._runs[run])
        self._descriptors.move_to_end(run)
        return found

    def close(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])


def _open_file(run: Run) -> int:
    try:
        descriptor = os.open(str(run.file), os.O_RDONLY)
    except FileNotFoundError as error:
        raise _missing(run) from error
    except OSError as error:
        raise TrainingError(f"{run.file} of the token files cannot be opened: {error}") from error
    if os.fstat(descriptor).st_size != run.end:
        os.close(descriptor)
        raise _too_short(run)
    if _HAS_ADVICE:  # windows are read in random order: read-ahead would be wasted
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
    return descriptor


_Block = tuple[int, int]
"""Index of a run, and number of a block that overlaps the run."""


class ObjectReader:
    """Reader of ranges of objects. Blocks that are not cached are requested concurrently."""

    def __init__(self, runs: Sequence[Run], blocks: Blocks | None = None) -> None:
        self._runs, self._cut = runs, blocks or Blocks()
        self._firsts = [0, *accumulate(run.end - run.begin for run in runs)]
        """For each run, the bytes of all runs before it."""
        self._blocks: OrderedDict[_Block, bytes] = OrderedDict()
        self._cached_bytes = 0
        """Bytes of all cached blocks."""

    def read_into(self, ranges: Sequence[ByteRange], buffer: memoryview) -> None:
        for portion in self._portions(ranges):
            self._fetch([block for byte_range in portion for block in self._blocks_of(byte_range)])
            for byte_range in portion:
                buffer[byte_range.at : byte_range.at + byte_range.size] = self._join(byte_range)
            # Evict only after the portion is joined: a portion may need more blocks than the cache keeps.
            while self._cached_bytes > self._cut.most:
                self._cached_bytes -= len(self._blocks.popitem(last=False)[1])

    def _portions(self, ranges: Sequence[ByteRange]) -> Iterator[list[ByteRange]]:
        """Yield the ranges in portions. The blocks of a portion are requested together."""
        portion: list[ByteRange] = []
        count = 0
        for byte_range in ranges:
            needed = len(self._blocks_of(byte_range))
            if portion and (count + needed) * self._cut.size > _MOST_REQUESTED:
                yield portion
                portion, count = [], 0
            portion.append(byte_range)
            count += needed
        if portion:
            yield portion

    def _fetch(self, blocks: list[_Block]) -> None:
        missing = [block for block in dict.fromkeys(blocks) if block not in self._blocks]
        for block, content in zip(missing, self._download(missing), strict=True):
            self._blocks[block] = content
            self._cached_bytes += len(content)
        for block in blocks:
            self._blocks.move_to_end(block)

    def _download(self, blocks: list[_Block]) -> list[bytes]:
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
        """Return the run's part of a block, as offsets in the run's file: first byte, and end (exclusive)."""
        first, header = self._firsts[run], self._runs[run].begin
        end = (number + 1) * self._cut.size + self._cut.overlap
        return max(number * self._cut.size, first) - first + header, min(end, self._firsts[run + 1]) - first + header

    def _blocks_of(self, byte_range: ByteRange) -> list[_Block]:
        begin = self._offset(byte_range)
        first, last = (byte // self._cut.size for byte in (begin, begin + byte_range.size - 1 - self._cut.overlap))
        return [(byte_range.run, number) for number in range(first, max(first, last) + 1)]

    def _offset(self, byte_range: ByteRange) -> int:
        """Return the first byte of a range, counted over all runs."""
        return self._firsts[byte_range.run] + byte_range.begin - self._runs[byte_range.run].begin

    def _join(self, byte_range: ByteRange) -> bytes:
        """Return the bytes of a range, joined from its blocks without their overlaps."""
        pieces, byte, end = [], byte_range.begin, byte_range.begin + byte_range.size
        for block in self._blocks_of(byte_range):
            begin, _ = self._range(*block)
            pieces.append(self._blocks[block][byte - begin : end - begin])
            byte += len(pieces[-1])
        return b"".join(pieces)

    def close(self) -> None:
        self._blocks.clear()
        self._cached_bytes = 0


def _object(run: Run) -> ObjectPath:
    assert isinstance(run.file, ObjectPath), "open_source chooses ObjectReader for objects"
    return run.file


def _missing(run: Run) -> TrainingError:
    return TrainingError(f"{run.file} of the token files is not there any more: restore it")


def _too_short(run: Run) -> TrainingError:
    return TrainingError(
        f"{run.file} of the token files has not the {run.end:,} bytes that it had when training began, or that its"
        " index names: somebody writes there; restore it"
    )

"""Windows of tokens from any place of many files, which are read as one sequence."""

from collections.abc import Iterator
from itertools import repeat
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pseudoreal_trainer.data.tokens.ranges import ByteRange, FileReader, ObjectReader, RangeReader
from pseudoreal_trainer.data.tokens.runs import Run, TokenFiles
from pseudoreal_trainer.errors import TrainingError
from pseudoreal_trainer.storage.path import ObjectPath

Tokens = NDArray[np.int32]
Starts = NDArray[np.int64]


class TokenReader:
    """The tokens of token files as one sequence. Memory is a few numbers per file, independent of documents and
    windows. Used by one thread at a time."""

    def __init__(self, files: TokenFiles, vocabulary: int, ranges: RangeReader | None = None) -> None:
        """`vocabulary`: every token must be below it. `ranges`: how to read the files; None: chosen by the type of
        their paths."""
        self._runs, self._dtype, self._vocabulary = files.runs, files.dtype, vocabulary
        self._unsigned = np.dtype(f"{self._dtype.byteorder}u{self._dtype.itemsize}")
        self._ends = np.cumsum([run.count for run in files.runs], dtype=np.int64)
        self._begins = np.concatenate([np.zeros(1, np.int64), self._ends])
        self._first_bytes = np.array([run.begin for run in files.runs], dtype=np.int64)
        self._ranges = ranges or (ObjectReader if are_objects(files.runs) else FileReader)(files.runs)

    @property
    def tokens(self) -> int:
        return int(self._begins[-1])

    def windows(self, starts: Starts, width: int) -> Tokens:
        """Return `width` tokens from each of `starts` on, [len(starts), width]. Raises TrainingError if a file has
        changed, or a token is not below the vocabulary."""
        found = np.empty((len(starts), width), self._dtype)
        if found.size:
            self._ranges.read_into(self._places(starts, width), found.reshape(-1).view(np.uint8).data)
            self._check(found, starts)
        return found.astype(np.int32)

    def _check(self, found: NDArray[Any], starts: Starts) -> None:
        """Raise TrainingError if a token is not below the vocabulary. The check uses the files' dtype, which is the
        narrowest. Viewed as unsigned, negative tokens are large."""
        unsigned = found.view(self._unsigned)
        if unsigned.max() >= self._vocabulary:
            row, column = np.argwhere(unsigned >= self._vocabulary)[0].tolist()
            raise self._wrong_token(int(starts[row]) + column)

    def _places(self, starts: Starts, width: int) -> list[ByteRange]:
        """Return the bytes of the windows, with their targets in the result. Windows within a file come in file order,
        so files are read one after another."""
        assert 0 <= starts.min() <= starts.max() <= self.tokens - width, "windows lie within the tokens"
        rows = np.argsort(starts, kind="stable")
        runs = np.searchsorted(self._ends, starts[rows], side="right")
        begins = starts[rows] - self._begins[runs]
        inside = starts[rows] + width <= self._ends[runs]
        size, some = self._dtype.itemsize, runs[inside]
        bytes_begin = self._first_bytes[some] + begins[inside] * size
        ats = rows[inside] * (width * size)
        found = [*map(ByteRange, some.tolist(), bytes_begin.tolist(), ats.tolist(), repeat(width * size))]
        for row, run, begin in np.stack([rows, runs, begins], 1)[~inside].tolist():
            found += self._window(run, begin, row * width, width)
        return found

    def _window(self, run: int, begin: int, at: int, count: int) -> Iterator[ByteRange]:
        """Yield the bytes of `count` tokens, starting at token `begin` of a run; they may continue in the next runs.
        `at`: index of the first token in the result."""
        width = self._dtype.itemsize
        while count:
            here = min(count, self._runs[run].count - begin)
            yield ByteRange(run, self._runs[run].begin + begin * width, at * width, here * width)
            run, begin, at, count = run + 1, 0, at + here, count - here

    def _wrong_token(self, place: int) -> TrainingError:
        run = int(np.searchsorted(self._ends, place, side="right"))
        return TrainingError(
            f"token {place - self._begins[run]:,} of {self._runs[run].file} is not below the vocabulary, which is"
            f" {self._vocabulary:,}: the files were made with another tokenizer, are of another dtype, or are damaged"
        )

    def close(self) -> None:
        self._ranges.close()


def are_objects(runs: tuple[Run, ...]) -> bool:
    """Return True if the tokens are on object storage."""
    return any(isinstance(run.file, ObjectPath) for run in runs)

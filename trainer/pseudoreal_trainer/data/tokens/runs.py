"""The model common to all formats of token files: contiguous runs of tokens of a fixed width."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from pseudoreal_trainer.errors import InvalidJobError
from pseudoreal_trainer.storage.path import StoragePath
from pseudoreal_trainer.storage.storage import storage_of


@dataclass(frozen=True)
class Run:
    """Contiguous tokens, from an offset in a file to the file's end."""

    file: StoragePath
    begin: int
    """Offset of the first token in bytes."""
    dtype: np.dtype[Any]
    """Integer dtype of a token, with byte order."""
    count: int

    @property
    def end(self) -> int:
        """Size of the whole file in bytes."""
        return self.begin + self.count * self.dtype.itemsize


@dataclass(frozen=True)
class TokenFiles:
    """A set of token files of one format. Its runs are one sequence of tokens in this order."""

    runs: tuple[Run, ...]
    indices: tuple[StoragePath, ...]
    """Files that describe the token files; their bytes are part of the identity."""
    vocabulary: int | None = None
    """Exclusive upper bound of the tokens; None: the format does not say."""
    end_of_document: int | None = None
    """The token that ends each document; None: the format does not say."""
    tokenizer: str | None = None
    """SHA-256 of the tokenizer's file; None: the format does not say."""
    sequence: int | None = None
    """Tokens of the rows into which documents are packed; None: not packed, or the format does not say."""
    sha256: tuple[str, ...] | None = None
    """SHA-256 of each run's file, computed by its writer; None: the format has none."""

    def __post_init__(self) -> None:
        """Raise InvalidJobError if the dtypes of the runs differ: then one of the files belongs to another corpus."""
        for run in self.runs:
            if run.dtype != self.dtype:
                raise InvalidJobError(
                    f"{run.file} has tokens of the dtype {run.dtype.name}, and {self.runs[0].file} of"
                    f" {self.dtype.name}; make them with one tokenizer, or name them as two sources"
                )

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.runs[0].dtype if self.runs else np.dtype("<u2")

    @property
    def tokens(self) -> int:
        return sum(run.count for run in self.runs)


def size_of(path: StoragePath, named_by: StoragePath | None = None) -> int:
    """Return the size of a file in bytes. Raises InvalidJobError if it is missing. `named_by`: the file that refers to
    `path`."""
    try:
        return storage_of(path).size()
    except FileNotFoundError as error:
        why = f", which belongs to {named_by}" if named_by else ""
        raise InvalidJobError(f"{path} is missing{why}; restore it, or leave both out of the source's files") from error


def check_size(path: StoragePath, expected: int, index: StoragePath) -> None:
    """Raise InvalidJobError if the file is missing, or its size differs from its index."""
    found = size_of(path, index)
    if found != expected:
        raise damaged(path, f"has {found:,} bytes, and by {index.name} it has {expected:,}")


def read_bytes(path: StoragePath, begin: int, count: int) -> bytes:
    """Read `count` bytes at offset `begin`; the range must lie inside the file."""
    if not count:
        return b""
    out = np.empty(count, np.uint8)
    storage_of(path).content().read_into(begin, out)
    return out.tobytes()


def damaged(path: StoragePath, what: str) -> InvalidJobError:
    """Return the error for a file that was truncated, changed or never finished. `what`: a predicate; `path` is its
    subject."""
    return InvalidJobError(f"{path} {what}: it was cut or changed, or is not finished; restore it or make it again")

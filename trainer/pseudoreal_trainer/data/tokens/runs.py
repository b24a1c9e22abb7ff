"""What all formats of token files have in common: runs of tokens of a fixed width that lie one behind the other."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from pseudoreal_trainer.checkpoint.storage.path import StoragePath
from pseudoreal_trainer.checkpoint.storage.storage import storage_of
from pseudoreal_trainer.errors import InvalidJobError


@dataclass(frozen=True)
class Run:
    """Tokens that lie one behind the other from a byte of a file to its end."""

    file: StoragePath
    begin: int
    """Byte at which the first token begins."""
    dtype: np.dtype[Any]
    """Integers, with their byte order."""
    count: int

    @property
    def end(self) -> int:
        """Bytes of the whole file."""
        return self.begin + self.count * self.dtype.itemsize


@dataclass(frozen=True)
class TokenFiles:
    """A set of token files of one format. Its runs are one sequence of tokens in this order."""

    runs: tuple[Run, ...]
    indices: tuple[StoragePath, ...]
    """Files that describe the others: they are part of the identity, byte by byte."""
    vocabulary: int | None = None
    """Every token is below it. None: the format does not say."""
    end_of_document: int | None = None
    """The token that ends each document. None: the format does not say."""
    tokenizer: str | None = None
    """SHA-256 of the tokenizer's file. None: the format does not say."""
    sequence: int | None = None
    """Tokens of the rows into which documents are packed. None: they are not, or the format does not say."""
    sha256: tuple[str, ...] | None = None
    """SHA-256 of each run's file as its writer computed it. None: the format has none."""

    def __post_init__(self) -> None:
        """Raises InvalidJobError where tokens have several widths: then one of the files is of another corpus."""
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
    """Bytes of a file. Raises InvalidJobError where it is missing. `named_by`: the file that says it is there."""
    try:
        return storage_of(path).size()
    except FileNotFoundError as error:
        why = f", which belongs to {named_by}" if named_by else ""
        raise InvalidJobError(f"{path} is missing{why}; restore it, or leave both out of the source's files") from error


def check_size(path: StoragePath, expected: int, index: StoragePath) -> None:
    """Raises InvalidJobError where the file is missing, or has not as many bytes as its index says."""
    found = size_of(path, index)
    if found != expected:
        raise damaged(path, f"has {found:,} bytes, and by {index.name} it has {expected:,}")


def read_bytes(path: StoragePath, begin: int, count: int) -> bytes:
    """Bytes of a file that has them."""
    if not count:
        return b""
    out = np.empty(count, np.uint8)
    storage_of(path).content().read_into(begin, out)
    return out.tobytes()


def damaged(path: StoragePath, what: str) -> InvalidJobError:
    """The error for a file that was cut, changed or never finished. `what`: what is wrong, with `path` as its
    subject."""
    return InvalidJobError(f"{path} {what}: it was cut or changed, or is not finished; restore it or make it again")

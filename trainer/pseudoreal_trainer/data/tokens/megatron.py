"""Megatron-LM's token files, read in place: X.bin holds tokens alone, X.idx lists where sequences and documents start.

    9 bytes   "MMIDIDX\\0\\0"
    uint64    version, 1
    uint8     number of the dtype
    uint64    S, sequences
    uint64    D, documents + 1
    int32[S]  tokens of each sequence
    int64[S]  its first byte in X.bin
    int64[D]  first sequence of each document, and S at the end
    int8[S]   modes, only in multimodal files

All little-endian (Megatron-LM, megatron/core/datasets/indexed_dataset.py). Sequences are contiguous, so the tokens are
one run. Most files have no end-of-document token: `tools/preprocess_data.py` writes it with `--append-eod`.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pseudoreal_trainer.data.tokens.runs import Run, TokenFiles, check_size, damaged, read_bytes, size_of
from pseudoreal_trainer.errors import InvalidJobError
from pseudoreal_trainer.storage.path import StoragePath

_HEADER = struct.Struct("<9sQBQQ")
_MAGIC, _VERSION = b"MMIDIDX\0\0", 1
_TYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
_FLOATS = {6: "float64", 7: "float32"}
_PORTION = 1 << 20
"""Number of entries of a table read at a time."""


@dataclass(frozen=True)
class MegatronIndex:
    """The header of an `.idx`, and the locations of its tables. The tables may not fit into memory."""

    path: StoragePath
    dtype: np.dtype[Any]
    sequences: int
    documents: int

    @property
    def lengths(self) -> "Table":
        return Table(self.path, _HEADER.size, np.dtype("<i4"), self.sequences)

    @property
    def pointers(self) -> "Table":
        return Table(self.path, self.lengths.end, np.dtype("<i8"), self.sequences)

    @property
    def first_sequences(self) -> "Table":
        return Table(self.path, self.pointers.end, np.dtype("<i8"), self.documents + 1)


@dataclass(frozen=True)
class Table:
    """An array of an index file. Entries are read on access."""

    path: StoragePath
    begin: int
    dtype: np.dtype[Any]
    count: int

    @property
    def end(self) -> int:
        """Offset of the first byte after the table."""
        return self.begin + self.count * self.dtype.itemsize

    def part(self, first: int, end: int) -> NDArray[np.int64]:
        """Return the entries first..end-1, [end - first]."""
        width = self.dtype.itemsize
        content = read_bytes(self.path, self.begin + first * width, (end - first) * width)
        return np.frombuffer(content, self.dtype).astype(np.int64)

    def at(self, number: int) -> int:
        return int(self.part(number, number + 1)[0])


def megatron_files(tokens: list[StoragePath]) -> TokenFiles:
    """Return the files X.bin, each with X.idx beside it. Reads a few bytes of each. Raises InvalidJobError if a file is
    missing, damaged, of another version or not of an integer type."""
    pairs = [(path, index_path(path)) for path in tokens]
    return TokenFiles(tuple(_run(*pair) for pair in pairs), tuple(index for _, index in pairs))


def index_path(tokens: StoragePath) -> StoragePath:
    """Return the path of X.idx for X.bin."""
    return tokens.parent / f"{tokens.name.removesuffix('.bin')}.idx"


def read_index(path: StoragePath) -> MegatronIndex:
    """Return the header of an `.idx`. Raises InvalidJobError if it is damaged, or contradicts the file's size."""
    size = size_of(path)
    if size < _HEADER.size:
        raise damaged(path, f"has {size} bytes, and the header of a Megatron index alone has {_HEADER.size}")
    magic, version, kind, sequences, ends = _HEADER.unpack(read_bytes(path, 0, _HEADER.size))
    if magic != _MAGIC:
        raise damaged(path, f"begins with {magic!r} and not with {_MAGIC!r}, as a Megatron index does")
    if version != _VERSION:
        raise InvalidJobError(f"{path} is a Megatron index of version {version}; version {_VERSION} alone is read")
    index = MegatronIndex(path, np.dtype(_integer(path, kind)).newbyteorder("<"), sequences, ends - 1)
    expected = index.first_sequences.end
    if ends < 1 or size not in (expected, expected + sequences):
        raise damaged(
            path,
            f"has {size:,} bytes; with the {sequences:,} sequences and {ends:,} ends of documents of its header it has"
            f" {expected:,}, or {expected + sequences:,} with modes",
        )
    return index


def _integer(path: StoragePath, kind: int) -> str:
    if kind not in _TYPES:
        found = _FLOATS.get(kind, "of no type that Megatron has")
        raise InvalidJobError(
            f"{path} says that its numbers are {found} (dtype {kind}); tokens are integers: name files of tokens"
        )
    return _TYPES[kind]


def _run(tokens: StoragePath, path: StoragePath) -> Run:
    """Return the tokens of X.bin. Checks only the ends of the tables; `verify` reads all of them."""
    index = read_index(path)
    if not index.sequences:
        raise InvalidJobError(f"{path} says that {tokens.name} holds no tokens; leave both out of the source's files")
    last, width = index.sequences - 1, index.dtype.itemsize
    begin, end = index.pointers.at(0), index.pointers.at(last) + index.lengths.at(last) * width
    documents = (index.first_sequences.at(0), index.first_sequences.at(index.documents))
    if begin != 0 or end % width or end < 0:
        raise damaged(path, f"says that tokens of {width} bytes lie from byte {begin} to {end}")
    if documents != (0, index.sequences):
        raise damaged(path, f"says that documents are the sequences {documents}, and has 0 to {index.sequences}")
    check_size(tokens, end, path)
    return Run(tokens, 0, index.dtype, end // width)


def verify(index: MegatronIndex) -> None:
    """Read all tables, chunk by chunk. Raises InvalidJobError if sequences are not contiguous, or documents are not in
    order."""
    byte = 0
    for first, end in _portions(index.sequences):
        pointers = index.pointers.part(first, end)
        ends = pointers + index.lengths.part(first, end) * index.dtype.itemsize
        wrong = np.flatnonzero(pointers != np.concatenate([[byte], ends[:-1]]))
        if len(wrong):
            raise damaged(index.path, f"says that sequence {first + wrong[0]:,} does not begin where the last one ends")
        byte = int(ends[-1])
    for first, end in _portions(index.documents):
        wrong = np.flatnonzero(np.diff(index.first_sequences.part(first, end + 1)) < 0)
        if len(wrong):
            raise damaged(index.path, f"says that document {first + wrong[0]:,} ends before it begins")


def documents_without_end(index: MegatronIndex, tokens: StoragePath, end: int, most: int) -> int:
    """Check at most `most` documents, spread evenly over the file. Return the number of documents that do not end with
    the token `end`."""
    found, width = 0, index.dtype.itemsize
    count = min(most, index.documents)
    for number in range(count):
        behind = index.first_sequences.at(number * index.documents // count + 1)
        if behind:
            last = index.pointers.at(behind - 1) + (index.lengths.at(behind - 1) - 1) * width
            found += last < 0 or np.frombuffer(read_bytes(tokens, last, width), index.dtype)[0] != end
    return found


def _portions(count: int) -> Iterator[tuple[int, int]]:
    for first in range(0, count, _PORTION):
        yield first, min(count, first + _PORTION)

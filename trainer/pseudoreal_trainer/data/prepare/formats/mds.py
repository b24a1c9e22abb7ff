"""MDS, the format of MosaicML Streaming: a folder with an index and shards.

A shard holds samples; a sample has one value per column.

A shard, in order: u32 number of samples n; u32[n + 1] offsets from the start of the file, of the start of each sample
and of the end of the last; a description, also contained in the index; the samples. A sample, in order: u32 size of
each column of variable size; the columns in the order of their names. llm-foundry stores tokens as int64 in a bytes
column; the end of a row may split a document.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import BaseModel, Field, ValidationError

from pseudoreal_trainer.data.prepare.formats.compressed import read_chunks
from pseudoreal_trainer.data.prepare.formats.records import Ids, Malformed, Record, Text
from pseudoreal_trainer.data.prepare.formats.text_files import pieces
from pseudoreal_trainer.data.prepare.reading.files import LocalFile
from pseudoreal_trainer.errors import InvalidJobError

INDEX = "index.json"
_MOST_BYTES = 2**32
"""Largest size of a shard with u32 offsets."""
_FOUNDRY = np.dtype("<i8")
_INTEGERS = {8: "u1", 9: "i1", 16: "<u2", 17: "<i2", 32: "<u4", 33: "<i4", 64: "<u8", 65: "<i8"}
"""MDS dtype codes -> NumPy dtypes, for arrays that store their dtype per sample."""
_TYPES = {"uint8": 8, "int8": 9, "uint16": 16, "int16": 17, "uint32": 32, "int32": 33, "uint64": 64, "int64": 65}


class _File(BaseModel):
    basename: Annotated[str, Field(pattern=r"^[^/]+$")]
    size: Annotated[int, Field(alias="bytes", ge=0, le=_MOST_BYTES)] = _MOST_BYTES


class _Shard(BaseModel):
    format: Literal["mds"]
    samples: int
    column_names: list[str]
    column_encodings: list[str]
    column_sizes: list[int | None]
    raw_data: _File
    zip_data: _File | None = None


class _Index(BaseModel):
    version: Literal[2]
    shards: list[_Shard]


@dataclass(frozen=True)
class MdsDataset:
    folder: Path
    shards: tuple[_Shard, ...]

    @property
    def files(self) -> tuple[Path, ...]:
        return (self.folder / INDEX, *(self._file(shard) for shard in self.shards))

    def records(self, field: str, end_of_document: int) -> Iterator[Record]:
        """Yield one record per sample with a text in the column `field`. Rows of tokens are joined, and split into
        documents at the end-of-document token. Raises InvalidJobError if the column holds neither text nor tokens, or a
        file is damaged."""
        joined, before = Joined(end_of_document), 0
        for shard, file in zip(self.shards, self.files[1:], strict=True):
            column, size = _Column.named(self.folder, shard, field), file.stat().st_size
            for number, sample in enumerate(_samples(file, shard, _content(file, shard.raw_data.size)), start=1):
                place, position = f"sample {number:,} of {file.name}", before + size * number // shard.samples
                for content in _documents(place, column, sample, joined):
                    yield Record(place, position, content)
            before += size
        for document in joined.rest():
            yield Record("the last sample", before, partial(_same, document))

    def _file(self, shard: _Shard) -> Path:
        raw = self.folder / shard.raw_data.basename
        return raw if raw.exists() or shard.zip_data is None else self.folder / shard.zip_data.basename


def read_mds(folder: Path) -> MdsDataset | None:
    """Return the dataset in the folder; None if there is none. Raises InvalidJobError if its index is damaged, or a
    file is missing."""
    path = folder / INDEX
    if not path.is_file() or b'"shards"' not in path.read_bytes():
        return None
    try:
        index = _Index.model_validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise InvalidJobError(f"{path} is no index of MDS version 2: {where}: {first['msg']}") from error
    dataset = MdsDataset(folder, tuple(shard for shard in index.shards if shard.samples))
    for file in dataset.files:
        if not file.exists():
            raise InvalidJobError(f"{file} is missing, which {INDEX} names; restore it")
    return dataset


class Joined:
    """Joins rows of tokens to documents. The end of a row may split a document."""

    def __init__(self, end_of_document: int) -> None:
        self._end = end_of_document
        self._begun: list[Ids] = []

    def join(self, row: Ids) -> Iterator[Ids]:
        """Yield the documents that end in this row, their end tokens included."""
        first = 0
        for end in np.flatnonzero(row == self._end) + 1:
            yield np.concatenate([*self._begun, row[first:end]])
            self._begun, first = [], int(end)
        self._begun.append(row[first:])

    def rest(self) -> Iterator[Ids]:
        """Yield the last document if the rows end before its end token."""
        if rest := [part for part in self._begun if len(part)]:
            yield np.concatenate(rest)


@dataclass(frozen=True)
class _Column:
    encoding: str
    sizes: tuple[int | None, ...]
    """Bytes of each column of a sample; None: variable."""
    number: int

    @classmethod
    def named(cls, folder: Path, shard: _Shard, field: str) -> "_Column":
        columns = dict(zip(shard.column_names, shard.column_encodings, strict=True))
        encoding = columns.get(field, "nothing")
        kind, _, form = encoding.partition(":")
        is_array = kind == "ndarray" and (not form or form.partition(":")[0] in _TYPES)
        if kind not in ("str", "bytes") and not is_array:
            listed = ", ".join(f"{name} ({each})" for name, each in columns.items())
            raise InvalidJobError(
                f"the column {field!r} of {folder} holds {encoding}; text (str) or tokens (bytes that are int64, or an"
                f" ndarray of integers) are needed; its columns are {listed}"
            )
        return cls(encoding, tuple(shard.column_sizes), shard.column_names.index(field))

    def value_in(self, sample: memoryview) -> bytes:
        """Return the bytes of this column in a sample. Raises ValueError if the sizes of all columns do not add up to
        the sample's size."""
        varying = sum(size is None for size in self.sizes)
        given = iter(np.frombuffer(sample[: 4 * varying], "<u4").tolist())
        sizes = [next(given) if size is None else size for size in self.sizes]
        if 4 * varying + sum(sizes) != len(sample):
            raise ValueError(f"its columns have {sum(sizes):,} bytes, and it has {len(sample) - 4 * varying:,}")
        begin = 4 * varying + sum(sizes[: self.number])
        return bytes(sample[begin : begin + sizes[self.number]])


def _documents(
    place: str, column: _Column, sample: memoryview, joined: Joined
) -> Iterator[Callable[[], Text] | Callable[[], Ids]]:
    """Yield a function for each document that ends in this sample; the function returns the document's text or tokens.
    Raises InvalidJobError if the sample is damaged."""
    try:
        value = column.value_in(sample)
        if column.encoding == "str":
            yield partial(_text, value)
        else:
            yield from (partial(_same, document) for document in joined.join(_ids(column.encoding, value)))
    except (ValueError, KeyError, IndexError) as error:
        raise InvalidJobError(f"{place} is not a row as {INDEX} says ({error}); restore the file") from error


def _content(file: Path, most: int) -> bytes:
    """Return the content of the whole shard (64 MiB with the writer's default). Raises InvalidJobError if the shard has
    more than `most` bytes."""
    parts, size = list[bytes](), 0
    for content, _ in read_chunks(LocalFile.found(file)):
        parts.append(content)
        size += len(content)
        if size > most:
            raise InvalidJobError(f"{file} has more than the {most:,} bytes that {INDEX} says; restore it")
    return b"".join(parts)


def _samples(file: Path, shard: _Shard, content: bytes) -> Iterator[memoryview]:
    begins = _begins(content, shard.samples)
    if begins is None:
        raise InvalidJobError(
            f"{file} has {len(content):,} bytes and is not the shard of {shard.samples:,} samples that {INDEX} says: it"
            " is damaged, or compressed in a way that is not known (.gz and .zst are); restore it"
        )
    view = memoryview(content)
    for begin, end in pairwise(begins):
        yield view[begin:end]


def _begins(content: bytes, samples: int) -> list[int] | None:
    """Return the starts of samples and the end of the last one, [samples + 1]; None if the shard is damaged."""
    size = 4 * (samples + 2)
    if len(content) < size:
        return None
    count, *begins = np.frombuffer(content[:size], "<u4").tolist()
    is_sound = count == samples and begins[0] >= size and begins[-1] == len(content) and begins == sorted(begins)
    return begins if is_sound else None


def _text(value: bytes) -> Text:
    try:
        return pieces(value.decode())
    except UnicodeDecodeError as error:
        raise Malformed(f"it is not UTF-8 ({error.reason})") from error


def _ids(encoding: str, value: bytes) -> Ids:
    """Return the tokens of a row. An array is stored as: its dtype code, if the dtype varies; 4 times the number of
    axes plus log2 of the bytes of a length, and the lengths, if the shape varies; and its numbers."""
    kind, _, form = encoding.partition(":")
    if kind == "bytes":
        return np.frombuffer(value, _FOUNDRY)
    dtype, _, shape = form.partition(":")
    code = _TYPES[dtype] if dtype else value[0]
    begin = 0 if dtype else 1
    if not shape:
        begin += 1 + (value[begin] >> 2) * 2 ** (value[begin] & 3)
    return np.frombuffer(value[begin:], _INTEGERS[code])


def _same(document: Ids) -> Ids:
    return document

"""Description of token files for people. Training does not use this module."""

from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from pseudoreal_trainer.data.tokens import megatron, native
from pseudoreal_trainer.data.tokens.arrays import numpy_files, raw_files
from pseudoreal_trainer.data.tokens.nanotron import nanotron_files
from pseudoreal_trainer.data.tokens.reader import TokenReader, Tokens
from pseudoreal_trainer.data.tokens.runs import TokenFiles, check_size
from pseudoreal_trainer.errors import InvalidJobError

_LOOKED_AT = 1 << 20
"""Number of tokens searched for ends of documents, if no table lists the documents."""


@dataclass(frozen=True)
class Inspection:
    format: str
    files: TokenFiles
    facts: dict[str, Any] = field(default_factory=dict)
    """Name of a further fact about the files -> value."""
    ends: tuple[int, ...] | None = None
    """Token offset of the end of each of the first documents; None: no table lists them."""


def inspect(path: Path, dtype: str | None, documents: int) -> Inspection:
    """Inspect the token files at `path`: a folder of native token files, X.bin or X.idx of Megatron-LM, X.ds of
    nanotron, a .npy file, or bare tokens if `dtype` is given. `documents`: number of first documents to locate. Raises
    InvalidJobError if a file is missing, damaged, or of no known format."""
    if dtype is not None:
        return Inspection("bare tokens", raw_files([path], dtype))
    if path.is_dir():
        return _native(path, documents)
    match path.suffix:
        case ".bin" | ".idx":
            return _megatron(path.with_suffix(".bin"), documents)
        case ".ds":
            return _nanotron(path, documents)
        case ".npy":
            return Inspection("numpy", numpy_files([path]))
    raise InvalidJobError(
        f"{path} is of no format that is known by its name: a folder of native token files, X.idx, X.ds or X.npy; for"
        " bare tokens give their dtype"
    )


def verify(path: Path) -> None:
    """Check more than `inspect`: read native shards in full, and all tables of a Megatron index. Files of other formats
    are not read. Raises InvalidJobError if a file is damaged."""
    if path.is_dir():
        index = native.read_index(path)
        for shard in index.shards:
            native.verify(path, index, shard)
    elif path.suffix in (".bin", ".idx"):
        megatron.verify(megatron.read_index(path.with_suffix(".idx")))


def first_documents(found: Inspection, count: int, end_of_document: int, most: int) -> list[Tokens]:
    """Return the first documents: at most `count`, and the first `most` tokens of each. Without a table of documents,
    the end-of-document token separates them."""
    reader = TokenReader(found.files, 2**31 - 1)
    try:
        ends = found.ends
        if ends is None:
            begin = _first(reader, 0, min(_LOOKED_AT, reader.tokens))
            ends = tuple((np.flatnonzero(begin == end_of_document) + 1).tolist()) or (len(begin),)
        return [_first(reader, begin, min(end, begin + most)) for begin, end in pairwise((0, *ends[:count]))]
    finally:
        reader.close()


def _first(reader: TokenReader, begin: int, end: int) -> Tokens:
    return reader.windows(np.array([begin], dtype=np.int64), end - begin).ravel()


def _native(folder: Path, documents: int) -> Inspection:
    index, files = native.read_index(folder), native.native_files(folder)
    for run in files.runs:
        check_size(run.file, run.end, folder / native.INDEX)
    facts = {"documents": index.documents, "shards": len(index.shards), "text_bytes": index.text_bytes}
    lengths = folder / f"{index.shards[0].name}.lengths" if index.shards else None
    if lengths is None or not lengths.exists():  # training does not need the lengths
        return Inspection("native", files, facts)
    ends = np.cumsum(np.fromfile(lengths, native.LENGTHS, documents), dtype=np.int64)
    return Inspection("native", files, facts, tuple(ends.tolist()))


def _megatron(tokens: Path, documents: int) -> Inspection:
    files = megatron.megatron_files([tokens])
    index = megatron.read_index(megatron.index_path(tokens))
    first = index.first_sequences.part(0, min(documents, index.documents) + 1)
    sequences = np.concatenate([[0], np.cumsum(index.lengths.part(0, int(first[-1])))])
    facts = {"documents": index.documents, "sequences": index.sequences}
    return Inspection("Megatron", files, facts, tuple(sequences[first[1:]].tolist()))


def _nanotron(tokens: Path, documents: int) -> Inspection:
    files = nanotron_files([tokens])
    index = tokens.with_name(f"{tokens.name}.index")
    if not index.exists():
        return Inspection("nanotron", files)
    ends = np.fromfile(index, "<u8", documents)
    return Inspection("nanotron", files, {"documents": index.stat().st_size // 8}, tuple(ends.tolist()))

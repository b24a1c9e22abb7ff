"""Files prepared by Fast-LLM (`fast_llm_prepared_dataset`).

Layout, in order: magic; u64 big-endian offset of the description; "lm begin"; "token begin"; tokens; i64 little-endian
[documents + 1], start of each document and end of the last; "token end"; possibly other sections; description: u32
big-endian size, then JSON.
"""

import os
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np
from pydantic import BaseModel, NonNegativeInt, ValidationError

from pseudoreal_trainer.data.prepare.formats.records import Ids, Record
from pseudoreal_trainer.errors import InvalidJobError

_MAGIC = b"fast_llm_prepared_dataset"
_BEGIN, _END = b"token begin", b"token end"


class _Tokens(BaseModel):
    begin: NonNegativeInt
    end: NonNegativeInt
    num_documents: NonNegativeInt
    num_tokens: NonNegativeInt
    data_type: Literal["uint8", "int8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]

    @property
    def dtype(self) -> np.dtype[np.generic]:
        return np.dtype(self.data_type).newbyteorder("<")

    @property
    def size(self) -> int:
        """Expected value of `end - begin`, in bytes: markers, tokens and document bounds."""
        content = self.num_tokens * self.dtype.itemsize + 8 * (self.num_documents + 1)
        return len(_BEGIN) + content + len(_END)


class _Description(BaseModel):
    tokens: _Tokens


def fast_llm_records(file: Path) -> Iterator[Record]:
    """Yield one record per document. Raises InvalidJobError if the file is damaged."""
    size = file.stat().st_size
    try:
        described = _description(file)
        bounds = _bounds(file, described)
    except (ValueError, OSError) as error:
        raise InvalidJobError(f"{file} is no sound file of Fast-LLM ({_first(error)}); copy it again") from error
    for number, (begin, end) in enumerate(pairwise(bounds.tolist()), start=1):
        document = partial(_document, file, described, begin, end)
        yield Record(f"document {number:,}", size * number // len(bounds), document)


def _description(file: Path) -> _Tokens:
    with file.open("rb") as opened:
        if opened.read(len(_MAGIC)) != _MAGIC:
            raise ValueError(f"it does not begin with {_MAGIC.decode()}")
        opened.seek(int.from_bytes(opened.read(8), "big"))
        size = int.from_bytes(opened.read(4), "big")
        content = opened.read(size)
    if not size or len(content) != size:
        raise ValueError("its description is cut")
    return _Description.model_validate_json(content).tokens


def _bounds(file: Path, described: _Tokens) -> Ids:
    """Return the starts of documents and the end of the last one, [documents + 1], in tokens."""
    end, content = described.end - len(_END), 8 * (described.num_documents + 1)
    with file.open("rb") as opened:
        is_framed = _read(opened, described.begin, len(_BEGIN)) == _BEGIN and _read(opened, end, len(_END)) == _END
        if described.end - described.begin != described.size or not is_framed:
            raise ValueError(f"its tokens are not between the bytes {described.begin:,} and {described.end:,}")
        bounds = np.frombuffer(_read(opened, end - content, content), "<i8")
    if bounds[0] != 0 or bounds[-1] != described.num_tokens or (np.diff(bounds) < 0).any():
        raise ValueError("its documents do not begin at 0, end with the tokens and follow each other")
    return bounds


def _document(file: Path, described: _Tokens, begin: int, end: int) -> Ids:
    width = described.dtype.itemsize
    try:
        # Read instead of mapped: a memory map kills the process if the file is truncated meanwhile.
        with file.open("rb") as opened:
            content = _read(opened, described.begin + len(_BEGIN) + begin * width, (end - begin) * width)
    except (ValueError, OSError) as error:
        raise InvalidJobError(f"{file} cannot be read ({error}); copy it again") from error
    tokens: Ids = np.frombuffer(content, described.dtype)
    return tokens


def _read(opened: BinaryIO, begin: int, size: int) -> bytes:
    """Return `size` bytes from `begin` on. Raises ValueError if there are fewer."""
    if begin < 0 or begin + size > os.fstat(opened.fileno()).st_size:
        raise ValueError(f"it ends before byte {begin + size:,}")
    opened.seek(begin)
    if len(content := opened.read(size)) != size:
        raise ValueError(f"it was cut before byte {begin + size:,}")
    return content


def _first(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False)[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    return str(error)

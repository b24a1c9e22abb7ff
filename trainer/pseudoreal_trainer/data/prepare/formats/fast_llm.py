"""Files that Fast-LLM has prepared (`fast_llm_prepared_dataset`).

The magic; u64 big-endian where the description is; "lm begin", and in it "token begin", the tokens,
i64[documents + 1] where documents begin and the last one ends, "token end"; perhaps more, and the description at the
end: u32 big-endian size, and JSON.
"""

from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Literal

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
        """Bytes from `begin` to `end`."""
        content = self.num_tokens * self.dtype.itemsize + 8 * (self.num_documents + 1)
        return len(_BEGIN) + content + len(_END)


class _Description(BaseModel):
    tokens: _Tokens


def fast_llm_records(file: Path) -> Iterator[Record]:
    """One document for each of the file's. Raises InvalidJobError where it is damaged."""
    size = file.stat().st_size
    try:
        description = _description(file)
        tokens, bounds = _mapped(file, description)
    except (ValueError, OSError) as error:
        raise InvalidJobError(f"{file} is no sound file of Fast-LLM ({_first(error)}); copy it again") from error
    for number, (begin, end) in enumerate(pairwise(bounds.tolist()), start=1):
        yield Record(f"document {number:,}", size * number // len(bounds), partial(_document, tokens, begin, end))


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


def _mapped(file: Path, described: _Tokens) -> tuple[Ids, Ids]:
    """All tokens, and where documents begin, [documents + 1]."""
    content = np.memmap(file, dtype=np.uint8, mode="r")
    whole = content[described.begin : described.end]
    is_framed = bytes(whole[: len(_BEGIN)]) == _BEGIN and bytes(whole[-len(_END) :]) == _END
    if len(whole) != described.size or not is_framed:
        raise ValueError(f"its tokens are not between the bytes {described.begin:,} and {described.end:,}")
    middle = len(_BEGIN) + described.num_tokens * described.dtype.itemsize
    tokens = whole[len(_BEGIN) : middle].view(described.dtype)
    bounds = np.frombuffer(bytes(whole[middle : -len(_END)]), "<i8")
    if bounds[0] != 0 or bounds[-1] != len(tokens) or (np.diff(bounds) < 0).any():
        raise ValueError("its documents do not begin at 0, end with the tokens and follow each other")
    return tokens, bounds


def _document(tokens: Ids, begin: int, end: int) -> Ids:
    return np.array(tokens[begin:end])


def _first(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False)[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    return str(error)

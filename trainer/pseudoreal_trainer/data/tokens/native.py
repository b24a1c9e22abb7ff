"""Native token files: a folder of shards with one index, written by `pseudoreal data prepare`.

    index.json      the index, written when all shards are there
    NNNNN.bin       the tokens of a shard, little-endian, without a header; each document ends with the end-of-document
                    token, which occurs nowhere else
    NNNNN.lengths   for each document its number of tokens, the end included; uint32, little-endian
    NNNNN.json      the shard's entry of the index: the shard is complete if and only if this file exists

Training reads only `index.json` and the `.bin` files.
"""

import hashlib
from array import array
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, Literal, Self, TypeVar

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray
from pseudoreal_api.base import ApiModel
from pydantic import Field, ValidationError, model_validator

from pseudoreal_trainer.data.tokens.runs import Run, TokenFiles, check_size
from pseudoreal_trainer.errors import InvalidJobError
from pseudoreal_trainer.storage.durable import sync, write_atomically
from pseudoreal_trainer.storage.path import StoragePath
from pseudoreal_trainer.storage.storage import storage_of

VERSION: Literal[1] = 1
INDEX = "index.json"
MOST_SHARD_BYTES = 2**31
"""Largest size of a shard's tokens, in bytes."""
LENGTHS = np.dtype("<u4")

TokenType = Literal["uint16", "uint32"]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Shard(ApiModel):
    name: str = Field(pattern=r"^[0-9]{5,9}$", description="Its number, the name of its files without the ending.")
    tokens: int = Field(ge=0, description="The ends of documents included.")
    documents: int = Field(ge=0)
    text_bytes: int = Field(ge=0, description="UTF-8 bytes of the text that its documents were.")
    sha256: Sha256 = Field(description="Of the tokens, NNNNN.bin.")
    lengths_sha256: Sha256 = Field(description="Of the lengths, NNNNN.lengths.")


class Index(ApiModel):
    """The content of `index.json`. The shards, in this order, are one sequence of tokens."""

    version: Literal[1]
    dtype: TokenType
    vocabulary: int = Field(ge=2, le=2**31, description="Every token is below it.")
    end_of_document: int = Field(ge=0, description="The token that ends every document.")
    tokenizer: Sha256 = Field(description="SHA-256 of the tokenizer's file.")
    sequence: int | None = Field(
        None, ge=2, description="Tokens of the rows into which documents are packed. None: they are not packed."
    )
    text_bytes: int = Field(ge=0, description="UTF-8 bytes of the text of all shards.")
    shards: list[Shard]

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> Self:
        names = [shard.name for shard in self.shards]
        text_bytes = sum(shard.text_bytes for shard in self.shards)
        if self.dtype != token_type(self.vocabulary):
            raise ValueError(f"a vocabulary of {self.vocabulary:,} has the dtype {token_type(self.vocabulary)}")
        if self.end_of_document >= self.vocabulary:
            raise ValueError(f"endOfDocument {self.end_of_document} is not below the vocabulary {self.vocabulary}")
        if len(set(names)) != len(names):
            raise ValueError("two shards have the same name")
        if text_bytes != self.text_bytes:
            raise ValueError(f"textBytes is {self.text_bytes:,}, and the shards have {text_bytes:,}")
        return self

    @property
    def tokens(self) -> int:
        return sum(shard.tokens for shard in self.shards)

    @property
    def documents(self) -> int:
        return sum(shard.documents for shard in self.shards)


def token_type(vocabulary: int) -> TokenType:
    """Return the narrowest type that holds every token of the vocabulary."""
    return "uint16" if vocabulary <= 2**16 else "uint32"


def little_endian(kind: DTypeLike) -> np.dtype[Any]:
    return np.dtype(kind).newbyteorder("<")


Model = TypeVar("Model", Shard, Index)


class ShardWriter:
    """Context manager that writes a shard document by document.

    The shard exists, complete, once `finish` has returned. If the context ends earlier, by an error or by the death of
    the process, the shard does not exist, and the next writer with this number replaces the partial files. Two writers
    must not use one number at the same time.
    """

    def __init__(self, folder: Path, number: int, *, vocabulary: int, end_of_document: int) -> None:
        self._folder, self.name = folder, f"{number:05d}"
        self._vocabulary, self._end = vocabulary, end_of_document
        self._dtype = little_endian(token_type(vocabulary))
        self._digest, self._lengths, self._text_bytes, self.tokens = hashlib.sha256(), array("I"), 0, 0
        folder.mkdir(parents=True, exist_ok=True)
        self._path(".json").unlink(missing_ok=True)
        self._file = self._temporary(".bin").open("wb")

    def has_room_for(self, tokens: int) -> bool:
        """Return True if a document of this many tokens still fits into the shard."""
        return (self.tokens + tokens + 1) * self._dtype.itemsize <= MOST_SHARD_BYTES

    def append(self, tokens: ArrayLike, text_bytes: int) -> None:
        """Append a document. `tokens`: [n], without the end token, which is added. `text_bytes`: UTF-8 bytes of its
        text. Raises ValueError if a token is outside of the vocabulary or is the end of a document, or if the shard has
        no room."""
        document = np.asarray(tokens, dtype=np.int64)
        self._check(document)
        content = np.append(document, self._end).astype(self._dtype)
        self._file.write(content.data)
        self._digest.update(content.data)
        self._lengths.append(len(content))
        self._text_bytes += text_bytes
        self.tokens += len(content)

    def _check(self, document: NDArray[np.int64]) -> None:
        where = f"document {len(self._lengths):,} of shard {self.name}"
        outside = document[(document < 0) | (document >= self._vocabulary)]
        if len(outside):
            raise ValueError(f"{where} has the token {outside[0]}, which is outside of 0..{self._vocabulary - 1}")
        if (document == self._end).any():
            raise ValueError(
                f"{where} has the token {self._end} inside, which ends documents; encode special strings as plain text"
            )
        if not self.has_room_for(len(document)):
            raise ValueError(f"{where} would make the shard larger than {MOST_SHARD_BYTES:,} bytes: begin another one")

    def finish(self) -> Shard:
        lengths = np.frombuffer(self._lengths, np.uintc).astype(LENGTHS).tobytes()
        self._file.close()
        self._temporary(".lengths").write_bytes(lengths)
        for ending in (".bin", ".lengths"):
            sync(self._temporary(ending))
            self._temporary(ending).rename(self._path(ending))
        shard = Shard(
            name=self.name,
            tokens=self.tokens,
            documents=len(self._lengths),
            text_bytes=self._text_bytes,
            sha256=self._digest.hexdigest(),
            lengths_sha256=hashlib.sha256(lengths).hexdigest(),
        )
        # Last: the shard is complete if and only if this file exists.
        write_atomically(self._path(".json"), shard.to_json(indent=1))
        return shard

    def _path(self, ending: str) -> Path:
        return self._folder / f"{self.name}{ending}"

    def _temporary(self, ending: str) -> Path:
        return self._folder / f"{self.name}{ending}.tmp"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()
        for ending in (".bin", ".lengths"):
            self._temporary(ending).unlink(missing_ok=True)


def finished_shard(folder: Path, number: int, dtype: TokenType) -> Shard | None:
    """Return the shard with this number if an earlier run has finished it. Raises InvalidJobError if its files
    contradict its entry."""
    path = folder / f"{number:05d}.json"
    if not path.exists():
        return None
    shard = _parsed(Shard, path, path.read_bytes())
    for file, size, _ in _files(folder, dtype, shard):
        check_size(file, size, path)
    return shard


def write_index(folder: Path, index: Index) -> None:
    write_atomically(folder / INDEX, index.to_json(indent=1))


def read_index(folder: StoragePath) -> Index:
    """Return the index of the folder. Raises InvalidJobError if it is missing, damaged or of another version."""
    path = folder / INDEX
    try:
        return _parsed(Index, path, storage_of(path).read())
    except FileNotFoundError as error:
        raise InvalidJobError(
            f"{path} is not there: {folder} holds no native token files, or `pseudoreal data prepare` has not ended;"
            " run it again, it goes on where it was"
        ) from error


def native_files(folder: StoragePath) -> TokenFiles:
    """Return the token files of the folder, without looking at the shards. Raises InvalidJobError like `read_index`."""
    index = read_index(folder)
    shards, dtype = [shard for shard in index.shards if shard.tokens], little_endian(index.dtype)
    return TokenFiles(
        runs=tuple(Run(folder / f"{shard.name}.bin", 0, dtype, shard.tokens) for shard in shards),
        indices=(folder / INDEX,),
        vocabulary=index.vocabulary,
        end_of_document=index.end_of_document,
        tokenizer=index.tokenizer,
        sequence=index.sequence,
        sha256=tuple(shard.sha256 for shard in shards),
    )


def verify(folder: StoragePath, index: Index, shard: Shard) -> None:
    """Read a whole shard. Raises InvalidJobError if a file is missing or contradicts the index."""
    for path, size, sha256 in _files(folder, index.dtype, shard):
        check_size(path, size, folder / INDEX)
        found = storage_of(path).sha256()
        if found != sha256:
            raise InvalidJobError(
                f"{path} has the SHA-256 {found[:16]}…, and {INDEX} says {sha256[:16]}…: it was changed or damaged;"
                f" restore it, or remove {shard.name}.json and prepare this shard again"
            )


def _files(folder: StoragePath, dtype: TokenType, shard: Shard) -> Iterator[tuple[StoragePath, int, str]]:
    """Yield path, bytes and SHA-256 of each file of a shard."""
    yield folder / f"{shard.name}.bin", shard.tokens * np.dtype(dtype).itemsize, shard.sha256
    yield folder / f"{shard.name}.lengths", shard.documents * LENGTHS.itemsize, shard.lengths_sha256


def _parsed(model: type[Model], path: StoragePath, content: bytes) -> Model:
    """Return the parsed content. Raises InvalidJobError with the first error; a wrong version takes precedence."""
    try:
        return model.model_validate_json(content)
    except ValidationError as error:
        errors = error.errors(include_url=False)
        first = min(errors, key=lambda each: each["loc"] != ("version",))
        where = ".".join(map(str, first["loc"])) or "the whole"
        raise InvalidJobError(
            f"{path} cannot be used: at {where}: {first['msg']}, found {str(first['input'])[:100]!r}; restore the file,"
            f" prepare the files again, or use a trainer that knows their version (this one knows {VERSION})"
        ) from error

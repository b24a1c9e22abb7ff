"""The corpus as bytes: read, concatenated, split into a training and a validation part."""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pseudoreal_api.base import ApiModel
from pseudoreal_api.spec.data import Data
from pydantic import Field

from pseudoreal_trainer.errors import InvalidJobError, TrainingError
from pseudoreal_trainer.storage.files import FileStorage

Bytes = NDArray[np.uint8]

_PORTION = 16 << 20
"""Bytes that are read and then hashed while they are in the CPU cache."""


class CorpusIdentity(ApiModel):
    """Identity of a corpus. Two corpora with the same text have the same samples, whatever the files' names."""

    files: int = Field(description="Files that matched.")
    size: int = Field(description="Bytes of all of them.")
    sha256: str = Field(description="Of their bytes, one file after the other in the order of their names.")
    method: Literal["Digests", "Ends", "Sources"] | None = Field(
        None,
        description="What sha256 is of instead, where the corpus is token files. Digests: the files' SHA-256, a line"
        " each. Ends: size, first and last MiB of each file, and all indices. Sources: a line `name sha256` for each"
        " source, by name.",
    )
    sources: "dict[str, CorpusIdentity] | None" = Field(None, description="The sources that it consists of.")

    def is_same_text(self, other: "CorpusIdentity") -> bool:
        return (self.size, self.sha256, self.method) == (other.size, other.sha256, other.method)

    def __str__(self) -> str:
        files = "1 file" if self.files == 1 else f"{self.files} files"
        return f"{self.size:,} bytes in {files} (SHA-256 {self.sha256[:16]}…)"


@dataclass(frozen=True)
class Corpus:
    text: Bytes
    """The whole text, [bytes]: the only copy in memory."""
    boundary: int
    """Offset of the validation part in bytes."""
    identity: CorpusIdentity

    @property
    def train(self) -> Bytes:
        return self.text[: self.boundary]

    @property
    def validation(self) -> Bytes:
        return self.text[self.boundary :]

    @property
    def bytes(self) -> int:
        return len(self.text)


def load_corpus(data: Data, sequence: int) -> Corpus:
    """Return the text of all matching files, in the order of their names. Raises InvalidJobError if the text is too
    short."""
    text, identity = _read(corpus_files(data))
    boundary = len(text) - round(len(text) * float(data.validation.fraction))
    corpus = Corpus(text, boundary, identity)
    for part, name in ((corpus.train, "training"), (corpus.validation, "validation")):
        if len(part) <= sequence:
            raise InvalidJobError(
                f"data.path {data.path} with data.pattern {data.pattern} holds {len(text)} bytes, of which"
                f" data.validation.fraction {data.validation.fraction} leaves {len(part)} for {name}; at least"
                f" model.sequenceLength + 1 = {sequence + 1} are needed: add text or lower model.sequenceLength"
            )
    return corpus


def _read(files: list[Path]) -> tuple[Bytes, CorpusIdentity]:
    """Return the files' text and identity. Raises TrainingError if a file changes while it is read."""
    sizes = [file.stat().st_size for file in files]
    text, digest, begin = np.empty(sum(sizes), dtype=np.uint8), hashlib.sha256(), 0
    for file, size in zip(files, sizes, strict=True):
        _read_file(file, text[begin : begin + size], digest)
        begin += size
    return text, CorpusIdentity(files=len(files), size=len(text), sha256=digest.hexdigest())


def _read_file(file: Path, out: Bytes, digest: "hashlib._Hash") -> None:
    with file.open("rb", buffering=0) as opened:
        done = 0
        while read := opened.readinto(out.data[done : done + _PORTION]):
            digest.update(out.data[done : done + read])
            done += read
        if done < len(out) or os.fstat(opened.fileno()).st_size != len(out):
            raise TrainingError(f"{file} of the corpus is being written: its size changed while it was read")


def corpus_files(data: Data) -> list[Path]:
    """Return the files of the corpus, sorted. Raises InvalidJobError if the folder is missing or no file matches."""
    folder = Path(data.path)
    if not folder.is_dir():
        raise InvalidJobError(
            f"data.path {data.path} is not a folder (looked for {folder.absolute()}); put the corpus there or change"
            " data.path"
        )
    try:
        found = FileStorage(folder).glob(data.pattern)
    except (ValueError, NotImplementedError) as error:
        raise InvalidJobError(f"data.pattern {data.pattern} is not a glob pattern below data.path: {error}") from error
    if not found:
        raise InvalidJobError(
            f"data.pattern {data.pattern} matches no file below data.path {data.path}; change the pattern or add files"
        )
    return [*found]

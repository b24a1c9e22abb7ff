"""The bytes of a file, decompressed by the end of its name: .gz or .zst."""

import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

from pseudoreal_trainer.errors import InvalidJobError
from pseudoreal_trainer.optional_packages import from_extra

_PORTION = 1 << 20
"""Bytes of the file that are read at once."""


class _Frame(Protocol):
    """The decompression of one part of a file: gzip calls it a member, Zstandard a frame. A file may have many."""

    @property
    def eof(self) -> bool:
        """Whether the part has ended."""

    @property
    def unused_data(self) -> bytes:
        """What follows it."""

    def decompress(self, content: bytes, /) -> bytes: ...


def read_chunks(file: Path) -> Iterator[tuple[bytes, int]]:
    """Contents, each with the bytes of the file read so far. Raises InvalidJobError where the file is damaged or was
    cut: neither may look like the end of a text."""
    match file.suffix:
        case ".gz":
            return _decompressed(file, lambda: zlib.decompressobj(wbits=31))
        case ".zst" | ".zstd":
            return _decompressed(file, _zstandard())
        case _:
            return _read(file)


def _read(file: Path) -> Iterator[tuple[bytes, int]]:
    with file.open("rb") as opened:
        while content := opened.read(_PORTION):
            yield content, opened.tell()


def _zstandard() -> Callable[[], _Frame]:
    with from_extra("data"):
        import zstandard
    decompressor = zstandard.ZstdDecompressor()
    return lambda: decompressor.decompressobj()


def _decompressed(file: Path, begin: Callable[[], _Frame]) -> Iterator[tuple[bytes, int]]:
    frame: _Frame | None = None
    for portion, position in _read(file):
        rest = portion
        while rest:
            frame = frame or begin()
            yield _content(file, frame, rest), position
            rest, frame = (frame.unused_data, None) if frame.eof else (b"", frame)
    if frame is not None:
        raise InvalidJobError(f"{file} ends in the middle of its compressed data: it was cut; copy it again")


def _content(file: Path, frame: _Frame, portion: bytes) -> bytes:
    try:
        return frame.decompress(portion)
    except Exception as error:  # each library has errors of its own, without a base in common
        if not isinstance(error, zlib.error) and type(error).__module__.partition(".")[0] != "zstandard":
            raise
        raise InvalidJobError(f"{file} cannot be decompressed ({error}): it is damaged; copy it again") from error

"""The bytes of a file, decompressed by the end of its name: .gz or .zst. A small file may hold more than any memory has
room for, so no more of it is there at a time than a portion."""

import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

from pseudoreal_trainer.errors import InvalidJobError
from pseudoreal_trainer.optional_packages import from_extra

_PORTION = 1 << 20
"""Most bytes that are read, or decompressed, at once."""


def read_chunks(file: Path) -> Iterator[tuple[bytes, int]]:
    """Contents of a portion each at most, with the bytes of the file read so far. Raises InvalidJobError where the file
    is damaged or was cut: neither may look like the end of a text."""
    match file.suffix:
        case ".gz":
            return _gzip(file)
        case ".zst" | ".zstd":
            return _zstandard(file)
        case _:
            return _read(file)


def _read(file: Path) -> Iterator[tuple[bytes, int]]:
    with file.open("rb") as opened:
        while content := opened.read(_PORTION):
            yield content, opened.tell()


def _gzip(file: Path) -> Iterator[tuple[bytes, int]]:
    """Of all members of the file."""
    member = None
    for portion, position in _read(file):
        rest, content = portion, b""
        # A member may have more to say than its portion's room, also of what it has taken in already.
        while rest or len(content) == _PORTION:
            member = member or zlib.decompressobj(wbits=31)
            try:
                content = member.decompress(rest, _PORTION)
            except zlib.error as error:
                raise _damaged(file, error) from error
            yield content, position
            if member.eof:
                rest, content, member = member.unused_data, b"", None
            else:
                rest = member.unconsumed_tail
    if member is not None:
        raise InvalidJobError(f"{file} ends in the middle of its compressed data: it was cut; copy it again")


def _zstandard(file: Path) -> Iterator[tuple[bytes, int]]:
    """Of all frames of the file. A frame whose window is larger than 128 MiB is refused."""
    with from_extra("data"):
        import pyarrow
    with pyarrow.OSFile(str(file)) as opened, pyarrow.CompressedInputStream(opened, "zstd") as decompressed:
        while content := _next(file, decompressed.read):
            yield content, opened.tell()


def _next(file: Path, read: Callable[[int], bytes]) -> bytes:
    try:
        return read(_PORTION)
    except OSError as error:  # with a number it is of the disk, without one of the content
        if error.errno is not None:
            raise
        raise _damaged(file, error) from error


def _damaged(file: Path, error: Exception) -> InvalidJobError:
    return InvalidJobError(f"{file} cannot be decompressed ({error}): it is damaged or was cut; copy it again")

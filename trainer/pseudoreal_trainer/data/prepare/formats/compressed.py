"""The bytes of a file, decompressed according to its suffix: .gz or .zst. A small file may expand beyond any memory, so
the content is read in chunks."""

import zlib
from collections.abc import Callable, Iterator

from pseudoreal_trainer.data.prepare.reading.files import InputFile
from pseudoreal_trainer.errors import InvalidJobError, from_extra

SUFFIXES = (".gz", ".zst", ".zstd")
_PORTION = 1 << 20
"""Maximum number of bytes read, or decompressed, at once."""


def read_chunks(file: InputFile, begin: int = 0) -> Iterator[tuple[bytes, int]]:
    """Yield the content in chunks, each with the number of bytes of the file read so far. Raises InvalidJobError if the
    file is damaged or truncated: neither may look like the end of a text. `begin`: first byte of an uncompressed
    file."""
    match file.name.suffix:
        case ".gz":
            return _gzip(file)
        case ".zst" | ".zstd":
            return _zstandard(file)
        case _:
            return _read(file, begin)


def is_compressed(file: InputFile) -> bool:
    return file.name.suffix in SUFFIXES


def _read(file: InputFile, begin: int = 0) -> Iterator[tuple[bytes, int]]:
    with file.open() as opened:
        opened.seek(begin)
        while content := opened.read(_PORTION):
            yield content, opened.tell()


def _gzip(file: InputFile) -> Iterator[tuple[bytes, int]]:
    """Yield the content of all members of the file."""
    member = None
    for portion, position in _read(file):
        rest, content = portion, b""
        # A member may produce more than one chunk from its input, even from input already consumed.
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


def _zstandard(file: InputFile) -> Iterator[tuple[bytes, int]]:
    """Yield the content of all frames of the file. A frame with a window larger than 128 MiB is rejected."""
    with from_extra("data"):
        import pyarrow
    with (
        file.open() as opened,
        pyarrow.PythonFile(opened, "r") as source,
        pyarrow.CompressedInputStream(source, "zstd") as decompressed,
    ):
        while content := _next(file, decompressed.read):
            yield content, opened.tell()


def _next(file: InputFile, read: Callable[[int], bytes]) -> bytes:
    try:
        return read(_PORTION)
    except OSError as error:  # with an errno the error is from the disk, without one from the content
        if error.errno is not None:
            raise
        raise _damaged(file, error) from error


def _damaged(file: InputFile, error: Exception) -> InvalidJobError:
    return InvalidJobError(f"{file} cannot be decompressed ({error}): it is damaged or was cut; copy it again")

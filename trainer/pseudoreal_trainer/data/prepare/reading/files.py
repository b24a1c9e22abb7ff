"""Files of inputs: on a file system, or read from a service by requests for ranges of bytes.

A remote file is read once, from start to end, a block at a time; only Parquet files are read in parts. A request that
fails is made again a bounded number of times, so a lost connection costs one block.
"""

import hashlib
import io
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Protocol, TypeVar
from urllib.parse import urlsplit

import structlog

from pseudoreal_trainer.data.prepare.reading import https
from pseudoreal_trainer.errors import InvalidJobError, TrainingError
from pseudoreal_trainer.storage import hub, services

_BLOCK = 8 << 20
"""Bytes of a request."""
_WAITS = (1.0, 2.0, 4.0, 8.0, 16.0)
"""Seconds before each further try of a request."""
_MAY_HELP = (408, 425, 429)
"""Client errors after which a further try may help."""

Answer = TypeVar("Answer")

log = structlog.get_logger()


class InputFile(Protocol):
    """A file of an input. Its text is its path, for messages."""

    @property
    def name(self) -> PurePosixPath | Path:
        """The path without a URL's host and query; its suffix determines the format."""

    @property
    def size(self) -> int:
        """Bytes when the file was found."""

    @property
    def identity(self) -> str:
        """Text that is equal for the same file under the same name."""

    def open(self) -> BinaryIO:
        """Open the file for reading, with random access."""

    def digest(self) -> bytes:
        """Return a digest that changes with the content."""

    def check_unchanged(self) -> None:
        """Raise TrainingError if the file is not the one that was found any more."""


@dataclass(frozen=True)
class LocalFile:
    path: Path
    size: int

    @classmethod
    def found(cls, path: Path) -> "LocalFile":
        return cls(path, path.stat().st_size)

    def __str__(self) -> str:
        return str(self.path)

    @property
    def name(self) -> Path:
        return self.path

    @property
    def identity(self) -> str:
        return str(self.path.resolve())

    def open(self) -> BinaryIO:
        return self.path.open("rb")

    def digest(self) -> bytes:
        with self.path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").digest()

    def check_unchanged(self) -> None:
        if (size := self.path.stat().st_size) != self.size:
            raise TrainingError(f"{self.path} had {self.size:,} bytes and has {size:,} now: it is being written")


@dataclass(frozen=True)
class RemoteFile:
    url: str = field(repr=False)
    """The URL; its query may hold a signature."""
    size: int
    version: str
    """ETag, generation or digest of the content, from the service; empty: the service gives none."""

    def __str__(self) -> str:
        return services.without_secrets(self.url) if services.scheme_of(self.url) == "https" else self.url

    @property
    def name(self) -> PurePosixPath:
        return PurePosixPath(urlsplit(self.url).path if services.scheme_of(self.url) == "https" else self.url)

    @property
    def identity(self) -> str:
        return str(self)

    def open(self) -> BinaryIO:
        return io.BufferedReader(_Ranges(self), _BLOCK)

    def digest(self) -> bytes:
        """Return the digest of the version: the content is not read for it."""
        return hashlib.sha256(f"{self.size} {self.version}".encode()).digest()

    def check_unchanged(self) -> None:
        now = described(self.url, patiently(self, lambda: info_of(self.url)))
        if (now.size, now.version) != (self.size, self.version):
            raise TrainingError(
                f"{self} has changed while it was read: it had {self.size:,} bytes ({self.version or 'no version'}),"
                f" and has {now.size:,} ({now.version or 'no version'}) now; start again once nobody writes it"
            )


def info_of(url: str) -> dict[str, Any]:
    """Ask the service for the file's size and version."""
    if services.scheme_of(url) == "https":
        return https.info(url)
    found: dict[str, Any] = services.file_system(url).info(url)
    return found


def described(url: str, info: dict[str, Any]) -> RemoteFile:
    """Return the file, with the size and version in fsspec's description of it."""
    # In this order: Hugging Face; S3, and https; Azure, and Google.
    named = ("blob_id", "ETag", "etag", "generation", "Last-Modified")
    version = next((str(info[name]) for name in named if info.get(name)), "")
    return RemoteFile(url, int(info["size"]), version.strip('"'))


class _Ranges(io.RawIOBase):
    """A remote file with random access; each read is a request for a range."""

    def __init__(self, file: RemoteFile) -> None:
        self._file, self._position = file, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._file.size}[whence]
        self._position = max(0, base + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:
        count = min(len(buffer), _BLOCK, self._file.size - self._position)
        if count <= 0:
            return 0
        begin = self._position
        try:
            content = patiently(self._file, lambda: _range(self._file, begin, begin + count))
        except services.StorageUnavailable:
            self._file.check_unchanged()  # the range may be refused because the file is shorter now
            raise
        memoryview(buffer)[:count] = content
        self._position += count
        return count


def _range(file: RemoteFile, begin: int, end: int) -> bytes:
    if services.scheme_of(file.url) == "https":
        return https.read(file.url, begin, end, file.version)
    [content] = services.read_ranges(services.file_system(file.url), [file.url], [begin], [end])
    if len(content) != end - begin:
        raise OSError(f"{len(content):,} bytes came of the {end - begin:,} from byte {begin:,} on")
    return content


def patiently(file: RemoteFile | str, request: Callable[[], Answer]) -> Answer:
    """Return the answer to a request, which is made again if that may help. Raises StorageUnavailable."""
    for seconds in (*_WAITS, None):
        try:
            return request()
        except (TrainingError, InvalidJobError):
            raise
        except Exception as error:
            if seconds is None or _is_final(error):
                raise hub.unavailable(str(file), error) from error
            log.warning("request_failed", file=str(file), error=services.reason(error), again_after_seconds=seconds)
        time.sleep(seconds)
    raise AssertionError("the last try returns or raises")


def _is_final(error: Exception) -> bool:
    status = services.status_of(error)
    if status is not None:
        return 400 <= status < 500 and status not in _MAY_HELP
    return isinstance(error, FileNotFoundError | PermissionError)

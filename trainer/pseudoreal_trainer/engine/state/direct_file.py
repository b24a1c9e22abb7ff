"""A nameless file on a local disk that is read and written past the page cache, in aligned pieces."""

import errno
import os
import secrets
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from torch import Tensor

from pseudoreal_trainer.engine.state.pinned import PlainMemory
from pseudoreal_trainer.engine.state.requests import Requests
from pseudoreal_trainer.errors import TrainingError
from pseudoreal_trainer.forecast.memory.crossing import PAGE
from pseudoreal_trainer.forecast.memory.memory import aligned
from pseudoreal_trainer.heartbeat.first_failure import FirstFailure

REQUEST_BYTES = 1 << 20
"""Most bytes of a request: enough for a disk to be fast, and few enough for a chunk to be many requests."""


class DiskError(TrainingError):
    """The disk of the offloaded state is full or fails."""


def aligned_buffer(size: int) -> Tensor:
    """Memory that direct I/O accepts, [aligned(size)] bytes."""
    return PlainMemory().allocate(max(aligned(size), PAGE))


Piece = tuple[int, Tensor]
"""An offset in the file, and bytes in memory: both aligned to pages, and whole pages."""


class DirectFile:
    """A file for direct I/O. Several threads may read and write it at the same time."""

    def __init__(self, folder: Path, size: int, failure: FirstFailure | None = None) -> None:
        """Makes a file of `size` bytes and takes all of its space at once. `failure`: where the first failure of the
        rank is noticed. Raises DiskError, with the figures, when it does not fit."""
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._require_space(size)
        try:
            self._file = _make_nameless(folder, size)
        except OSError as error:
            raise self._failed(f"room for {size:,} bytes cannot be made", error) from error
        self._requests, self._failure = Requests(), failure or FirstFailure()

    def read(self, pieces: Sequence[Piece]) -> None:
        """Fills the memory of the pieces, with many requests at a time. When it returns or raises, no request is under
        way any more. Raises DiskError."""
        self._requests.run([partial(self._read, *part) for part in _parts(pieces)])

    def write(self, pieces: Sequence[Piece]) -> None:
        """Writes the memory of the pieces, as `read` fills it. Raises DiskError."""
        self._requests.run([partial(self._write, *part) for part in _parts(pieces)])

    def close(self) -> None:
        self._requests.close()
        os.close(self._file)

    # A request that fails is noticed here: those that are under way beside it, for which `read` and `write` wait, may
    # hang on the same disk.

    def _read(self, offset: int, view: memoryview) -> None:
        with self._failure.noticed():
            try:
                done = 0
                while done < len(view):
                    count = os.preadv(self._file, [view[done:]], offset + done)
                    if count == 0:
                        raise OSError(errno.EIO, "the file is shorter than it was made")
                    done += count
            except OSError as error:
                raise self._failed("the state cannot be read", error) from error

    def _write(self, offset: int, view: memoryview) -> None:
        with self._failure.noticed():
            try:
                done = 0
                while done < len(view):
                    done += os.pwritev(self._file, [view[done:]], offset + done)
            except OSError as error:
                raise self._failed("the state cannot be written", error) from error

    def _require_space(self, size: int) -> None:
        disk = os.statvfs(self._folder)
        free = disk.f_bavail * disk.f_frsize
        if free < size:
            raise DiskError(
                f"the state whose home is Disk needs {size:,} bytes in {self._folder}, where {free:,} are free;"
                " free some, give offload.volume another disk, or move units to the host"
            )

    def _failed(self, what: str, error: OSError) -> DiskError:
        return DiskError(
            f"offload on disk, in {self._folder}: {what}: {error.strerror or error}; the last committed checkpoint is"
            " intact, training goes on from it when the disk is mended"
        )


def _parts(pieces: Sequence[Piece]) -> Iterator[tuple[int, memoryview]]:
    for offset, memory in pieces:
        view = memory.numpy().data
        for begin in range(0, len(view), REQUEST_BYTES):
            yield offset + begin, view[begin : begin + REQUEST_BYTES]


def _make_nameless(folder: Path, size: int) -> int:
    file = _open_nameless(folder)
    try:
        os.posix_fallocate(file, 0, size)
    except OSError:
        os.close(file)
        raise
    return file


def _open_nameless(folder: Path) -> int:
    """Descriptor of a new file: nameless, so that nothing is left behind however the process ends; direct, where the
    file system supports it."""
    path = folder / f"state-{secrets.token_hex(8)}"
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
    try:
        file = os.open(path, flags | os.O_DIRECT, 0o600)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        path.unlink(missing_ok=True)
        file = os.open(path, flags, 0o600)
    path.unlink()
    return file

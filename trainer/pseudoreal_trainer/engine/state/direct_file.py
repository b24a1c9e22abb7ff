"""A nameless file on a local disk, read and written with direct I/O in aligned pieces."""

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
from pseudoreal_trainer.plan.memory.pinned_arena import PAGE
from pseudoreal_trainer.plan.memory.tiers import aligned
from pseudoreal_trainer.runtime.first_failure import FirstFailure

REQUEST_BYTES = 1 << 20
"""Largest request in bytes: enough for a disk to be fast, and few enough to cut a chunk into many requests."""


class DiskError(TrainingError):
    """Raised if the disk of the offloaded state is full or fails."""


def aligned_buffer(size: int) -> Tensor:
    """Return memory for direct I/O, [aligned(size)] bytes, at least a page."""
    return PlainMemory().allocate(max(aligned(size), PAGE))


Piece = tuple[int, Tensor]
"""Offset in the file, and bytes in memory; both page-aligned and of whole pages."""


class DirectFile:
    """A file for direct I/O. Several threads may read and write it at the same time."""

    def __init__(self, folder: Path, size: int, failure: FirstFailure | None = None) -> None:
        """Create a file of `size` bytes and reserve all of its space. `failure`: where the rank's first failure is
        recorded. Raises DiskError, with the figures, if the file does not fit."""
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._require_space(size)
        try:
            self._file = _make_nameless(folder, size)
        except OSError as error:
            raise self._failed(f"room for {size:,} bytes cannot be made", error) from error
        self._requests, self._failure = Requests(), failure or FirstFailure()

    def read(self, pieces: Sequence[Piece]) -> None:
        """Fill the memory of the pieces, with many requests at a time. After the return, or an error, no request is in
        flight. Raises DiskError."""
        self._requests.run([partial(self._read, *part) for part in _parts(pieces)])

    def write(self, pieces: Sequence[Piece]) -> None:
        """Write the memory of the pieces, in the same way as `read`. Raises DiskError."""
        self._requests.run([partial(self._write, *part) for part in _parts(pieces)])

    def close(self) -> None:
        self._requests.close()
        os.close(self._file)

    # A request records its own failure: `read` and `write` wait for the other requests in flight, which may hang on the
    # same disk.

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
    """Return the descriptor of a new file: nameless, so that nothing is left however the process ends; with direct I/O
    if the file system supports it."""
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

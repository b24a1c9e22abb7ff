"""A nameless file on a local disk that is read and written past the page cache, in aligned pieces."""

import errno
import mmap
import os
import secrets
from pathlib import Path

import torch
from torch import Tensor

from pseudoreal_trainer.errors import TrainingError

ALIGNMENT = 4096
"""Bytes; enough for every disk that asks for alignment."""


class DiskError(TrainingError):
    """The disk of the offloaded state is full or fails."""


def aligned(size: int) -> int:
    """The next multiple of the alignment."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def aligned_buffer(size: int, *, pinned: bool = False) -> Tensor:
    """Bytes in memory that direct I/O accepts, [aligned(size)]. Pinned: a GPU copies from it without the processor."""
    room = max(aligned(size), ALIGNMENT)
    if pinned:
        # CUDA pins whole pages.
        return torch.empty(room, dtype=torch.uint8, pin_memory=True)
    # Private, as all other memory of the process: a limit on its data counts it.
    memory = mmap.mmap(-1, room, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=torch.uint8)


class DirectFile:
    def __init__(self, folder: Path, size: int) -> None:
        """All of `size` bytes is on the disk at once. Raises DiskError, with the figures, when it does not fit."""
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._require_space(size)
        try:
            self._file = _make_nameless(folder, size)
        except OSError as error:
            raise self._failed(f"room for {size:,} bytes cannot be made", error) from error

    def read(self, offset: int, buffer: Tensor) -> None:
        """Fills `buffer`: aligned bytes."""
        view = buffer.numpy().data
        try:
            done = 0
            while done < len(view):
                count = os.preadv(self._file, [view[done:]], offset + done)
                if count == 0:
                    raise OSError(errno.EIO, "the file is shorter than it was made")
                done += count
        except OSError as error:
            raise self._failed("the state cannot be read", error) from error

    def write(self, offset: int, buffer: Tensor) -> None:
        """Writes all of `buffer`: aligned bytes."""
        view = buffer.numpy().data
        try:
            done = 0
            while done < len(view):
                done += os.pwritev(self._file, [view[done:]], offset + done)
        except OSError as error:
            raise self._failed("the state cannot be written", error) from error

    def close(self) -> None:
        os.close(self._file)

    def _require_space(self, size: int) -> None:
        disk = os.statvfs(self._folder)
        free = disk.f_bavail * disk.f_frsize
        if free < size:
            raise DiskError(
                f"the state whose home is disk needs {size:,} bytes in {self._folder}, where {free:,} are free;"
                " free some, give offload.volume another disk, or move units to the host"
            )

    def _failed(self, what: str, error: OSError) -> DiskError:
        return DiskError(
            f"offload on disk, in {self._folder}: {what}: {error.strerror}; the last committed checkpoint is intact,"
            " training goes on from it when the disk is mended"
        )


def _make_nameless(folder: Path, size: int) -> int:
    file = _open_nameless(folder)
    try:
        os.posix_fallocate(file, 0, size)
    except OSError:
        os.close(file)
        raise
    return file


def _open_nameless(folder: Path) -> int:
    """Nameless, so that nothing is left behind however the process ends; direct, where the file system can."""
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

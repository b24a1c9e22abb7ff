"""Files, such as checkpoints and token files, on a file system that is mounted on all ranks."""

import hashlib
import os
import secrets
import shutil
import stat
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pseudoreal_trainer.portable import read_at
from pseudoreal_trainer.storage.durable import rename_new, sync, write_atomically

_FLUSHED_BYTES = 32 << 20
_flush_data = getattr(os, "fdatasync", os.fsync)
"""Flush of a file's content; macOS has none that leaves out the times of the file."""


@dataclass(frozen=True)
class FileStorage:
    path: Path

    def exists(self) -> bool:
        return _mode(self.path) is not None

    def read(self) -> bytes:
        return self.path.read_bytes()

    def size(self) -> int:
        return self.path.stat().st_size

    def sha256(self) -> str:
        with self.path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def content(self) -> "FileContent":
        return FileContent(self.path)

    def output(self, size: int) -> "FileOutput":  # noqa: ARG002
        return FileOutput(self.path)

    def replace(self, text: str) -> None:
        write_atomically(self.path, text)

    def create(self, text: str) -> None:
        temporary = self.path.with_name(f"{self.path.name}.{secrets.token_hex(8)}")
        try:
            with temporary.open("xb") as file:
                file.write(text.encode())
                file.flush()
                os.fsync(file.fileno())  # content before name, as in `write_atomically`
            rename_new(temporary, self.path)
        finally:
            temporary.unlink(missing_ok=True)
        sync(self.path.parent)

    def complete(self, text: str) -> None:
        folder = self.path.parent
        # The folder and its entries must be durable before the manifest is.
        sync(folder)
        sync(folder.parent)
        write_atomically(self.path, text)

    def find(self, name: str) -> Sequence[Path]:
        # Not `glob`, which skips unreadable entries: during a short failure, the volume would look empty.
        try:
            folders = [self.path / folder for folder in os.listdir(self.path)]
        except FileNotFoundError:
            return []
        return [folder / name for folder in folders if stat.S_ISREG(_mode(folder / name) or 0)]

    def glob(self, pattern: str) -> Sequence[Path]:
        found = [path for path in self.path.glob(pattern) if path.is_file()]
        return sorted(found, key=lambda path: path.relative_to(self.path).as_posix())

    def folders(self) -> Sequence[Path]:
        return [path for path in self.path.iterdir() if stat.S_ISDIR(_mode(path) or 0)] if self.exists() else []

    def make_folder(self) -> None:
        self.path.mkdir(parents=True, exist_ok=True)

    def remove_folder(self, first: str) -> None:
        (self.path / first).unlink(missing_ok=True)
        if self.exists():
            # The removal of `first` must be durable before any other file is removed.
            sync(self.path)
            shutil.rmtree(self.path)


def _mode(path: Path) -> int | None:
    """Return the mode of the file or directory; None if it does not exist. Raises OSError for other errors."""
    try:
        return path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None


class FileContent:
    """The bytes of a file, read instead of mapped: a memory map kills the process (SIGBUS) if the file is truncated
    meanwhile, or its disk or server fails.

    The file is opened for each read: a checkpoint of many ranks has more files than a process may have open.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def read_into(self, begin: int, out: NDArray[np.uint8]) -> None:
        view, done = out.data, 0
        descriptor = os.open(self._path, os.O_RDONLY)
        try:
            while done < len(view):
                count = _pread(self._path, descriptor, view[done:], begin + done)
                if count == 0:
                    raise ValueError(f"{self._path} ends before byte {begin + len(view):,}: it was cut; restore it")
                done += count
        finally:
            os.close(descriptor)


def _pread(path: Path, descriptor: int, view: memoryview, begin: int) -> int:
    """Read from offset `begin` into the start of `view`; return the number of bytes. Raises OSError with the path; the
    system's own error has none."""
    try:
        return read_at(descriptor, view, begin)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


class FileOutput:
    def __init__(self, path: Path) -> None:
        self._file = path.open("xb")
        self._thread = ThreadPoolExecutor(1, "flush")
        self._flushed: Future[None] | None = None
        self._unflushed = 0

    def write(self, content: memoryview) -> None:
        self._file.write(content)
        self._flush(len(content))

    def _flush(self, size: int) -> None:
        """Count `size` new bytes. Once `_FLUSHED_BYTES` are not flushed, start an fdatasync on the flush thread, so
        that `finish` has little left to write."""
        self._unflushed += size
        if self._unflushed >= _FLUSHED_BYTES and (self._flushed is None or self._flushed.done()):
            self._await_flush()
            self._file.flush()
            self._flushed = self._thread.submit(_flush_data, self._file.fileno())
            self._unflushed = 0

    def _await_flush(self) -> None:
        """Wait for the pending flush and raise its error: the kernel reports a failed disk only once."""
        if self._flushed is not None:
            self._flushed.result()

    def finish(self) -> None:
        self._await_flush()
        self._file.flush()
        os.fsync(self._file.fileno())
        self.close()

    def close(self) -> None:
        """Close the file; if it was not finished, the incomplete file stays. Does not wait for the flush thread: a
        hanging disk would delay the error."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._file.close()

"""The interface of a file system and of object storage."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pseudoreal_trainer.storage.files import FileStorage
from pseudoreal_trainer.storage.objects import ObjectStorage
from pseudoreal_trainer.storage.path import StoragePath


class Output(Protocol):
    """A new file, written from start to end."""

    def write(self, content: memoryview) -> None:
        """Append `content`. The caller may change the buffer afterwards."""

    def finish(self) -> None:
        """Finish the file. The content then survives a crash of the machine. On a file system, the name survives once
        `Storage.complete` has written the last file of the folder."""

    def close(self) -> None:
        """Close the file. If it was not finished, the incomplete file stays on a file system, and no object appears in
        object storage."""


class Content(Protocol):
    """The bytes of a file, with random access."""

    def read_into(self, begin: int, out: NDArray[np.uint8]) -> None:
        """Fill `out` with the bytes from offset `begin` on. Raises ValueError if the file ends earlier."""


class Storage(Protocol):
    """The file or the folder at a path. Methods raise OSError; for object storage, FileNotFoundError, FileExistsError,
    and StorageUnavailable for all other errors."""

    def exists(self) -> bool: ...

    def read(self) -> bytes: ...

    def size(self) -> int:
        """Return the size of the file in bytes."""

    def sha256(self) -> str: ...

    def content(self) -> Content: ...

    def output(self, size: int) -> Output:
        """Create the file, which must not exist yet and will have `size` bytes."""

    def replace(self, text: str) -> None:
        """Write the file atomically: readers see the old text or the new text."""

    def create(self, text: str) -> None:
        """Write the file atomically if it does not exist. Raises FileExistsError if another process has written it."""

    def complete(self, text: str) -> None:
        """Write the last file of its folder. If this file exists after a crash, so do all files of the folder."""

    def glob(self, pattern: str) -> Sequence[StoragePath]:
        """Return the matching files below this folder, in the order of their names. Raises ValueError or
        NotImplementedError for an invalid pattern."""

    def folders(self) -> Sequence[StoragePath]:
        """Return the folders directly below this one."""

    def make_folder(self) -> None: ...

    def remove_folder(self, first: str) -> None:
        """Remove the folder with its contents, if it exists; the file `first` is removed first."""


def storage_of(path: StoragePath) -> Storage:
    return FileStorage(path) if isinstance(path, Path) else ObjectStorage(path)

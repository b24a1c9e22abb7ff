"""What checkpoints ask of the file system or the object storage that keeps them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pseudoreal_trainer.checkpoint.storage.files import FileStorage
from pseudoreal_trainer.checkpoint.storage.objects import ObjectStorage
from pseudoreal_trainer.checkpoint.storage.path import StoragePath


class Output(Protocol):
    """A new file that is written from its begin to its end."""

    def write(self, content: memoryview) -> None:
        """Appends `content`, which may be changed once this returns."""

    def finish(self) -> None:
        """Ends the file, which survives a crash of the machine once this returns."""

    def close(self) -> None:
        """Gives the file up if it was not finished."""


class Content(Protocol):
    """The bytes of a file, read where they are needed."""

    def read_into(self, begin: int, out: NDArray[np.uint8]) -> None:
        """Fills `out` with the bytes from `begin` on. Raises ValueError when the file ends before."""


class Storage(Protocol):
    """The file or the folder at a path. Its methods raise OSError: for object storage FileNotFoundError and
    FileExistsError, and StorageUnavailable for everything else."""

    def exists(self) -> bool: ...

    def read(self) -> bytes: ...

    def size(self) -> int:
        """Size of the file in bytes."""

    def sha256(self) -> str: ...

    def content(self) -> Content: ...

    def output(self, size: int) -> Output:
        """Begins a file that is not there yet and will have `size` bytes."""

    def replace(self, text: str) -> None:
        """Writes the file all or not at all: whoever reads it sees the old text or the new one."""

    def create(self, text: str) -> None:
        """Writes the file all or not at all, unless it is there. Raises FileExistsError where another one has written
        it."""

    def complete(self, text: str) -> None:
        """Writes the last file of its folder: when it is there, all that were written before are."""

    def glob(self, pattern: str) -> Sequence[StoragePath]:
        """The files below this folder that match, in the order of their names. Raises ValueError and
        NotImplementedError where the pattern is none."""

    def folders(self) -> Sequence[StoragePath]:
        """The folders directly below this one."""

    def make_folder(self) -> None: ...

    def remove_folder(self, first: str) -> None:
        """Removes the folder with all that it holds, if it is there; the file named `first` goes first."""


def storage_of(path: StoragePath) -> Storage:
    return FileStorage(path) if isinstance(path, Path) else ObjectStorage(path)

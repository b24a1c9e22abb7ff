"""What checkpoints ask of the file system or the object storage that keeps them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pseudoreal_trainer.checkpoint.storage.files import FileStorage
from pseudoreal_trainer.checkpoint.storage.objects import ObjectStorage
from pseudoreal_trainer.checkpoint.storage.place import Place


class Output(Protocol):
    """A new file, from its begin to its end."""

    def write(self, content: memoryview) -> None:
        """The content may be changed afterwards."""

    def finish(self) -> None:
        """The file survives a crash of the machine once this returns."""

    def close(self) -> None:
        """A file that was not finished is given up."""


class Content(Protocol):
    """The bytes of a file, read where they are needed."""

    def read_into(self, begin: int, out: NDArray[np.uint8]) -> None:
        """Fills `out` with the bytes from `begin` on. Raises ValueError when the file ends before."""


class Storage(Protocol):
    """The file or the folder at a place. Raises OSError; of object storage FileNotFoundError and FileExistsError, and
    StorageUnavailable for all else."""

    def exists(self) -> bool: ...

    def read(self) -> bytes: ...

    def size(self) -> int:
        """Bytes."""

    def sha256(self) -> str: ...

    def content(self) -> Content: ...

    def output(self, size: int) -> Output:
        """Of a file that is not there yet and will have so many bytes."""

    def replace(self, text: str) -> None:
        """All or nothing: whoever reads the file sees the old text or the new one."""

    def complete(self, text: str) -> None:
        """Writes the last file of its folder: when it is there, all that were written before are."""

    def find(self, name: str) -> Sequence[Place]:
        """The files of this name in the folders of this folder."""

    def folders(self) -> Sequence[Place]:
        """Directly below this one."""

    def make_folder(self) -> None: ...

    def remove_folder(self, first: str) -> None:
        """With all that it holds, if it is there: at first the file of this name."""


def storage_of(place: Place) -> Storage:
    return FileStorage(place) if isinstance(place, Path) else ObjectStorage(place)

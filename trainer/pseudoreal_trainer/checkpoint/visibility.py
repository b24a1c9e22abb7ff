"""Wait until this rank sees a file as another rank has seen it.

For up to a minute after another machine has written a file, a network file system may report the file as missing or
show the old content: NFS caches attributes of folders, and the absence of names, for up to 60 s (acdirmax).
"""

import errno
import hashlib
import time
from collections.abc import Callable
from typing import TypeVar

import structlog

from pseudoreal_trainer.errors import TrainingError
from pseudoreal_trainer.storage.path import StoragePath
from pseudoreal_trainer.storage.storage import storage_of

_MOST_SECONDS = 120.0
_AGAIN_SECONDS = 0.5
_NOT_YET = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)

Seen = TypeVar("Seen")

log = structlog.get_logger()


def read_when_visible(path: StoragePath, sha256: str) -> bytes:
    """Return the content of a file, once the content has the digest sent by another rank. Raises TrainingError on a
    timeout."""

    def read() -> bytes | None:
        found = storage_of(path).read()
        return found if hashlib.sha256(found).hexdigest() == sha256 else None

    return _await(path, read)


def open_when_visible(path: StoragePath, open_: Callable[[], Seen]) -> Seen:
    """Return the result of `open_` for a file that another rank has verified. Raises TrainingError on a timeout."""
    return _await(path, open_)


def await_size(path: StoragePath, size: int) -> None:
    """Wait until a file has the size that another rank sees. Raises TrainingError on a timeout."""
    _await(path, lambda: True if storage_of(path).size() == size else None)


def _await(path: StoragePath, look: Callable[[], Seen | None]) -> Seen:
    """Return the first result of `look` that is not None."""
    until, told = time.monotonic() + _MOST_SECONDS, False
    while (found := _seen(path, look)) is None:
        if time.monotonic() >= until:
            raise TrainingError(
                f"this rank does not see {path} as rank 0 does, for {_MOST_SECONDS:.0f} s now; are all pods on the same"
                " volume?"
            )
        if not told:
            log.warning("waits_for_the_volume_to_show_a_file", file=str(path))
            told = True
        time.sleep(_AGAIN_SECONDS)
    return found


def _seen(path: StoragePath, look: Callable[[], Seen | None]) -> Seen | None:
    try:
        return look()
    except OSError as error:
        if error.errno in _NOT_YET or isinstance(error, FileNotFoundError):
            return None
        raise TrainingError(f"{path} cannot be read: {error}") from error

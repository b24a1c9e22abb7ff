"""Building blocks of writes that survive a crash of the machine: atomic write, rename to an unused name, flush."""

import ctypes
import errno
import os
from pathlib import Path

_AT_FDCWD, _RENAME_NOREPLACE = -100, 1
"""From linux/fcntl.h and linux/fs.h."""
_NOT_THERE = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)
"""Error numbers of renameat2 on a file system or kernel without support for it."""


def write_atomically(path: Path, text: str) -> None:
    """Write a file atomically: readers of `path` see the old text or the new text."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_bytes(text.encode())
    # Content before name: after a crash, the name could otherwise stand for an empty or partly written file.
    sync(temporary)
    temporary.rename(path)
    # A rename changes the directory, and survives a crash once the directory is flushed.
    sync(path.parent)


def rename_new(source: Path, target: Path) -> None:
    """Rename a file to an unused name. Raises FileExistsError if the name is taken. The caller flushes the folder.

    Some file systems lack renameat2's RENAME_NOREPLACE (NFS), some lack hard links (CIFS, many FUSE ones). Without
    either, a second writer could not be excluded: raises OSError.
    """
    number = _rename_new(os.fsencode(source), os.fsencode(target))
    if number == 0:
        return
    if number not in _NOT_THERE:
        raise OSError(number, os.strerror(number), str(source), None, str(target))
    os.link(source, target)
    source.unlink()


def _rename_new(source: bytes, target: bytes) -> int:
    """Return the error number of renameat2; 0 on success."""
    try:
        call = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:  # not Linux, or not glibc
        return errno.ENOSYS
    return 0 if call(_AT_FDCWD, source, _AT_FDCWD, target, _RENAME_NOREPLACE) == 0 else ctypes.get_errno()


def sync(path: Path) -> None:
    """Flush a file or a directory, so that it survives a crash of the machine."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

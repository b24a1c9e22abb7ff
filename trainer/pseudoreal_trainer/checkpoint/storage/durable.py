"""Files that survive a crash of the machine once the call returns."""

import ctypes
import errno
import os
from pathlib import Path

_AT_FDCWD, _RENAME_NOREPLACE = -100, 1
"""Of linux/fcntl.h and linux/fs.h."""
_NOT_THERE = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)
"""What renameat2 says where the file system, or the system, does not have it."""


def write_atomically(path: Path, text: str) -> None:
    """Writes a file all or not at all: whoever reads `path` sees the old text or the new one."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text)
    sync(temporary)
    temporary.rename(path)
    sync(path.parent)


def rename_new(source: Path, target: Path) -> None:
    """Rename a file to a name that nobody has. Raises FileExistsError where somebody has it.

    Not every file system has the rename that refuses (NFS has not), and not every one has hard links (CIFS and many of
    FUSE have not). One with neither cannot keep two writers apart.
    """
    number = _rename_new(os.fsencode(source), os.fsencode(target))
    if number == 0:
        return
    if number not in _NOT_THERE:
        raise OSError(number, os.strerror(number), str(source), None, str(target))
    os.link(source, target)
    source.unlink()


def _rename_new(source: bytes, target: bytes) -> int:
    """Return the number of the error; 0: the file is renamed."""
    try:
        call = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:  # not Linux, or not glibc
        return errno.ENOSYS
    return 0 if call(_AT_FDCWD, source, _AT_FDCWD, target, _RENAME_NOREPLACE) == 0 else ctypes.get_errno()


def sync(path: Path) -> None:
    """Makes a file or a directory survive a crash of the machine."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

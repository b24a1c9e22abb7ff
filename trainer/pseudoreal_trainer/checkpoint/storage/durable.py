"""Files that survive a crash of the machine once the call returns."""

import os
from pathlib import Path


def write_atomically(path: Path, text: str) -> None:
    """Writes a file all or not at all: whoever reads `path` sees the old text or the new one."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text)
    sync(temporary)
    temporary.rename(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Makes a file or a directory survive a crash of the machine."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

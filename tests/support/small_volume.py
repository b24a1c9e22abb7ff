"""A separate file system in memory: with a size limit, or read-only."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def mounted(folder: Path, options: str) -> Iterator[Path]:
    """Create the folder and mount the file system there; skip the test if this user may not mount."""
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"this user may not mount a file system: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)

"""Locks of the cache: one process at a time may change a part of it."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager

from pseudoreal_dev.machine import paths
from pseudoreal_dev.machine.progress import progress


@contextmanager
def exclusive(part: str) -> Iterator[None]:
    """Hold the lock of one part of the cache. The kernel releases the lock when the process ends, for whatever
    reason."""
    paths.cache().mkdir(parents=True, exist_ok=True)
    with (paths.cache() / f"{part}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with progress.step(f"waiting for another run to leave the {part} alone"):
                fcntl.flock(file, fcntl.LOCK_EX)
        yield

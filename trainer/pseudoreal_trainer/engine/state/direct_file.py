"""An unlinked file on a local disk, read and written with direct I/O in aligned pieces."""

import errno
import fcntl
import os
import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from queue import SimpleQueue

from torch import Tensor

from pseudoreal_trainer.engine.state.pinned import PlainMemory
from pseudoreal_trainer.errors import TrainingError
from pseudoreal_trainer.plan.memory.pinned_arena import PAGE
from pseudoreal_trainer.plan.memory.tiers import aligned
from pseudoreal_trainer.portable import read_at
from pseudoreal_trainer.runtime.first_failure import FirstFailure

DEPTH = 16
"""Maximum number of requests that one caller has in flight."""
_CALLERS = 2
"""Number of callers that may read or write chunks at the same time."""
_STACK = 512 << 10
"""Stack of a thread in bytes. The default of 8 MiB per thread would count towards a limit on the process's data."""

Request = Callable[[], None]


class Requests:
    """Threads that run disk requests, many at a time. The threads start at the first call with several requests.

    One after the other, requests would leave a fast disk idle most of the time.
    """

    def __init__(self) -> None:
        self._given: SimpleQueue[tuple[Request, Future[None]] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._starting = threading.Lock()

    def run(self, requests: Sequence[Request]) -> None:
        """Run all requests and return once no request is in flight: their buffers are then free. If requests failed,
        raise the first failure, also once no request is in flight."""
        if len(requests) == 1:
            requests[0]()
            return
        self._start()
        under_way: deque[Future[None]] = deque()
        failures: list[BaseException | None] = []
        for request in requests:
            if len(under_way) == DEPTH:
                failures.append(under_way.popleft().exception())
            if any(failures):
                break
            under_way.append(self._give(request))
        failures += [future.exception() for future in under_way]
        for failure in failures:
            if failure is not None:
                raise failure

    def close(self) -> None:
        for _ in self._threads:
            self._given.put(None)
        for thread in self._threads:
            thread.join()

    def _give(self, request: Request) -> Future[None]:
        done: Future[None] = Future()
        self._given.put((request, done))
        return done

    def _start(self) -> None:
        with self._starting:
            if self._threads:
                return
            usual = threading.stack_size(_STACK)
            try:
                for number in range(DEPTH * _CALLERS):
                    thread = threading.Thread(target=self._work, name=f"disk-{number}", daemon=True)
                    thread.start()
                    self._threads.append(thread)
            finally:
                threading.stack_size(usual)

    def _work(self) -> None:
        while (given := self._given.get()) is not None:
            request, done = given
            try:
                request()
            except BaseException as failure:
                done.set_exception(failure)
            else:
                done.set_result(None)


REQUEST_BYTES = 1 << 20
"""Largest request in bytes: large enough for a disk to be fast, and small enough to cut a chunk into many requests."""


class DiskError(TrainingError):
    """Raised if the disk of the offloaded state is full or fails."""


def aligned_buffer(size: int) -> Tensor:
    """Return memory for direct I/O, [aligned(size)] bytes, at least a page."""
    return PlainMemory().allocate(max(aligned(size), PAGE))


Piece = tuple[int, Tensor]
"""(offset in the file, bytes in memory). Offset, address and size are multiples of the page size."""


class DirectFile:
    """A file for direct I/O. Several threads may read and write it at the same time."""

    def __init__(self, folder: Path, size: int, failure: FirstFailure | None = None) -> None:
        """Create a file of `size` bytes and reserve all of its space. `failure`: record of the rank's first failure.
        Raises DiskError, with the figures, if the file does not fit."""
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._require_space(size)
        try:
            self._file = _make_nameless(folder, size)
        except OSError as error:
            raise self._failed(f"room for {size:,} bytes cannot be made", error) from error
        self._requests, self._failure = Requests(), failure or FirstFailure()

    def read(self, pieces: Sequence[Piece]) -> None:
        """Read the pieces from the file into their memory, with many requests at a time. Raises DiskError.

        The requests own the memory until this returns or raises; no request is in flight afterwards.
        """
        self._requests.run([partial(self._read, *part) for part in _parts(pieces)])

    def write(self, pieces: Sequence[Piece]) -> None:
        """Write the memory of the pieces to the file, with many requests at a time as in `read`. Raises DiskError."""
        self._requests.run([partial(self._write, *part) for part in _parts(pieces)])

    def close(self) -> None:
        self._requests.close()
        os.close(self._file)

    # A request records its own failure: `read` and `write` wait for the other requests in flight, which may hang on the
    # same disk.

    def _read(self, offset: int, view: memoryview) -> None:
        with self._failure.noticed():
            try:
                done = 0
                while done < len(view):
                    count = read_at(self._file, view[done:], offset + done)
                    if count == 0:
                        raise OSError(errno.EIO, "the file is shorter than it was made")
                    done += count
            except OSError as error:
                raise self._failed("the state cannot be read", error) from error

    def _write(self, offset: int, view: memoryview) -> None:
        with self._failure.noticed():
            try:
                done = 0
                while done < len(view):
                    done += os.pwrite(self._file, view[done:], offset + done)
            except OSError as error:
                raise self._failed("the state cannot be written", error) from error

    def _require_space(self, size: int) -> None:
        disk = os.statvfs(self._folder)
        free = disk.f_bavail * disk.f_frsize
        if free < size:
            raise DiskError(
                f"the state whose home is Disk needs {size:,} bytes in {self._folder}, where {free:,} are free;"
                " free some, give offload.volume another disk, or move units to the host"
            )

    def _failed(self, what: str, error: OSError) -> DiskError:
        return DiskError(
            f"offload on disk, in {self._folder}: {what}: {error.strerror or error}; the last committed checkpoint is"
            " intact, training goes on from it when the disk is mended"
        )


def _parts(pieces: Sequence[Piece]) -> Iterator[tuple[int, memoryview]]:
    for offset, memory in pieces:
        view = memory.numpy().data
        for begin in range(0, len(view), REQUEST_BYTES):
            yield offset + begin, view[begin : begin + REQUEST_BYTES]


def _make_nameless(folder: Path, size: int) -> int:
    file = _open_nameless(folder)
    # macOS cannot reserve: a disk that gets full there fails a write, with a DiskError.
    reserve = getattr(os, "posix_fallocate", None)
    try:
        if reserve is None:
            os.ftruncate(file, size)
        else:
            reserve(file, 0, size)
    except OSError:
        os.close(file)
        raise
    return file


def _open_nameless(folder: Path) -> int:
    """Return the descriptor of a new file: unlinked, so that nothing is left however the process ends; with direct I/O
    if the system and the file system support it."""
    path = folder / f"state-{secrets.token_hex(8)}"
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
    try:
        file = os.open(path, flags | getattr(os, "O_DIRECT", 0), 0o600)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        path.unlink(missing_ok=True)
        file = os.open(path, flags, 0o600)
    if hasattr(fcntl, "F_NOCACHE"):  # macOS: bypasses the page cache as O_DIRECT does
        fcntl.fcntl(file, fcntl.F_NOCACHE, 1)
    path.unlink()
    return file

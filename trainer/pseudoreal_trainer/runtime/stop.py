"""A pod's SIGTERM: remembered whenever it comes, and passed on to torchrun."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess


class Stopped(Exception):
    """Raised when the pod is asked to stop during work that may end at any point."""


class Stop:
    """Listens for SIGTERM from its creation on. A delink does not look at it: it is short and runs to its end."""

    def __init__(self) -> None:
        self.asked = False
        self._process: BaseProcess | None = None
        self._raises = False
        signal.signal(signal.SIGTERM, self._hear)

    def pass_on_to(self, process: BaseProcess) -> None:
        self._process = process
        # A signal that came before this call found no process.
        if self.asked:
            process.terminate()

    @contextmanager
    def ending_at_once(self) -> Iterator[None]:
        """Raise Stopped in the block when a SIGTERM comes, or has come. The block must change nothing that outlives it,
        and must run on the main thread, which receives signals."""
        self._raises = True
        try:
            if self.asked:
                raise Stopped
            yield
        finally:
            self._raises = False

    def _hear(self, *_: object) -> None:
        # First: whoever sees the ranks end must already know that the pod was asked to stop, and start no new ranks.
        self.asked = True
        if self._process is not None:
            self._process.terminate()
        if self._raises:
            raise Stopped

"""A SIGTERM of the pod, whenever it comes, is remembered and passed on to torchrun."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess


class Stopped(Exception):
    """The pod was asked to stop while it did what may end at any point."""


class Stop:
    """Listens from when it is made. A delink is short and simply ends."""

    def __init__(self) -> None:
        self.asked = False
        self._process: BaseProcess | None = None
        self._raises = False
        signal.signal(signal.SIGTERM, self._hear)

    def pass_on_to(self, process: BaseProcess) -> None:
        self._process = process
        if self.asked:
            process.terminate()

    @contextmanager
    def ending_at_once(self) -> Iterator[None]:
        """Raises Stopped in the block when a SIGTERM comes, or has come. The block changes nothing that outlives it,
        and runs on the main thread, which hears signals."""
        self._raises = True
        try:
            if self.asked:
                raise Stopped
            yield
        finally:
            self._raises = False

    def _hear(self, *_: object) -> None:
        self.asked = True
        if self._process is not None:
            self._process.terminate()
        if self._raises:
            raise Stopped

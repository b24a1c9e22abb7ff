"""SIGTERM of a pod: recorded from the start of the program, and passed on to torchrun."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess


class Stopped(Exception):
    """Raised when the pod is asked to stop during work that may end at any point."""


class Stop:
    """Handler of SIGTERM, installed when the object is created. A delink ignores SIGTERM: a delink is short and runs to
    its end."""

    def __init__(self) -> None:
        self.asked = False
        self._process: BaseProcess | None = None
        self._raises = False
        signal.signal(signal.SIGTERM, self._hear)

    def pass_on_to(self, process: BaseProcess) -> None:
        self._process = process
        # A SIGTERM before this call found no process to pass the signal on to.
        if self.asked:
            process.terminate()

    @contextmanager
    def ending_at_once(self) -> Iterator[None]:
        """Raise Stopped inside the context at a SIGTERM, or on entry after an earlier SIGTERM. The context must leave
        no lasting changes, and must run on the main thread, which receives signals."""
        self._raises = True
        try:
            if self.asked:
                raise Stopped
            yield
        finally:
            self._raises = False

    def _hear(self, *_: object) -> None:
        # Set first: `asked` must be True when the supervisor sees the ranks end, or the supervisor would start new
        # ranks.
        self.asked = True
        if self._process is not None:
            self._process.terminate()
        if self._raises:
            raise Stopped

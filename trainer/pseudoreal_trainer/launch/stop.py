"""A SIGTERM of the pod, whenever it comes, is remembered and passed on to torchrun."""

import signal
from multiprocessing.process import BaseProcess


class Stop:
    """Listens from when it is made. A delink is short and simply ends."""

    def __init__(self) -> None:
        self.asked = False
        self._process: BaseProcess | None = None
        signal.signal(signal.SIGTERM, self._hear)

    def pass_on_to(self, process: BaseProcess) -> None:
        self._process = process
        if self.asked:
            process.terminate()

    def _hear(self, *_: object) -> None:
        self.asked = True
        if self._process is not None:
            self._process.terminate()

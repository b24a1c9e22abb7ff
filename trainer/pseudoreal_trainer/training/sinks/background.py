"""A sink in a thread of its own: training neither waits for it nor ends with it."""

import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue

import structlog

from pseudoreal_trainer.training.sinks.sink import Figures, Sink, Texts

CLOSE_SECONDS = 15.0
"""Seconds that all sinks together have for what is left when a phase ends: a pod that is asked to end has little
time."""
_MOST_WAITING = 10_000
"""Steps that may wait for a slow service; further ones are left out there."""

log = structlog.get_logger()


class Background:
    def __init__(self, name: str, open_: Callable[[], Sink], most_waiting: int = _MOST_WAITING) -> None:
        """`open_`: makes the sink, in the thread, as it may wait for a service."""
        self._name, self._open, self._most = name, open_, most_waiting
        self._waiting: SimpleQueue[tuple[int, Figures, Texts] | None] = SimpleQueue()
        self._left_out = 0
        self._thread = threading.Thread(target=self._run, name=f"sink {name}", daemon=True)
        self._thread.start()

    def log(self, step: int, figures: Figures, texts: Texts) -> None:
        """Never waits. What a sink cannot take that was given up, or is too far behind, is left out there."""
        if self._waiting.qsize() < self._most:
            self._waiting.put((step, figures, texts))
        else:
            self._left_out += 1

    def end(self) -> None:
        """Says that nothing follows."""
        self._waiting.put(None)

    def join(self, deadline: float) -> None:
        """After `end`: waits until all is sent, until `deadline` (of time.monotonic) at the latest."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        # What `end` has put there is no step.
        left_out = self._left_out + max(0, self._waiting.qsize() - 1)
        if left_out:
            log.warning("sink_left_steps_out", sink=self._name, steps=left_out)

    def _run(self) -> None:
        try:
            sink = self._open()
            while (waiting := self._waiting.get()) is not None:
                sink.log(*waiting)
            sink.close()
        except Exception as error:  # of a foreign program, or of a service: metrics.jsonl has all figures
            log.warning("sink_given_up", sink=self._name, error=f"{type(error).__name__}: {error}")


def finish(sinks: Sequence[Background]) -> None:
    """Sends what is left in all of them."""
    for sink in sinks:
        sink.end()
    deadline = time.monotonic() + CLOSE_SECONDS
    for sink in sinks:
        sink.join(deadline)

"""Runs a sink in a daemon thread: a slow or failed metrics service neither delays nor fails training."""

import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue

import structlog

from pseudoreal_trainer.training.sinks.sink import Figures, Sink, Texts

CLOSE_SECONDS = 15.0
"""Seconds for all sinks together to send their backlog at the end of a phase: a terminating pod has little time."""
_MOST_WAITING = 10_000
"""Most steps queued for a slow service; further steps are dropped for this sink."""

log = structlog.get_logger()


class Background:
    def __init__(self, name: str, open_: Callable[[], Sink], most_waiting: int = _MOST_WAITING) -> None:
        """`open_` creates the sink. The sink's thread calls it, because it may wait for a service."""
        self._name, self._open, self._most = name, open_, most_waiting
        self._waiting: SimpleQueue[tuple[int, Figures, Texts] | None] = SimpleQueue()
        self._left_out = 0
        self._thread = threading.Thread(target=self._run, name=f"sink {name}", daemon=True)
        self._thread.start()

    def log(self, step: int, figures: Figures, texts: Texts) -> None:
        """Queue the figures without waiting. A failed sink, or one too far behind, drops the step."""
        if self._waiting.qsize() < self._most:
            self._waiting.put((step, figures, texts))
        else:
            self._left_out += 1

    def end(self) -> None:
        """Signal the end of the figures."""
        self._waiting.put(None)

    def join(self, deadline: float) -> None:
        """After `end`: wait until everything is sent, at most until `deadline` (of time.monotonic)."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        # One entry of the queue is the end marker put by `end`.
        left_out = self._left_out + max(0, self._waiting.qsize() - 1)
        if left_out:
            log.warning("sink_left_steps_out", sink=self._name, steps=left_out)

    def _run(self) -> None:
        try:
            sink = self._open()
            while (waiting := self._waiting.get()) is not None:
                sink.log(*waiting)
            sink.close()
        except Exception as error:  # an error in a third-party library or its service; metrics.jsonl has all figures
            log.warning("sink_given_up", sink=self._name, error=f"{type(error).__name__}: {error}")


def finish(sinks: Sequence[Background]) -> None:
    """Send the backlog of all sinks, within `CLOSE_SECONDS` together."""
    for sink in sinks:
        sink.end()
    deadline = time.monotonic() + CLOSE_SECONDS
    for sink in sinks:
        sink.join(deadline)

"""What a thread beside the main one does: its own work, or waits for other ranks. The main thread asks."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class _State:
    """Replaced as a whole, as another thread reads it."""

    waits_for: str | None
    since: float
    waited: float
    """Seconds, until `since`."""


class SideThread:
    def __init__(self, work: str, clock: Clock = time.monotonic) -> None:
        """`work`: its own, in words."""
        self.work, self._clock = work, clock
        self._state = _State(None, clock(), 0.0)

    @contextmanager
    def wait(self, what: str) -> Iterator[None]:
        """Around a wait for other ranks. That thread calls it."""
        begin, waited = self._clock(), self._state.waited
        self._state = _State(what, begin, waited)
        try:
            yield
        finally:
            now = self._clock()
            self._state = _State(None, now, waited + now - begin)

    def waited(self) -> float:
        """Seconds, so far."""
        state = self._state
        return state.waited + (0.0 if state.waits_for is None else self._clock() - state.since)

    def now(self) -> tuple[str | None, float]:
        """What it waits for (None: it works), and since when."""
        state = self._state
        return state.waits_for, state.since

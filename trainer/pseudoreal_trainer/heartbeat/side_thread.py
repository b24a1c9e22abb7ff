"""What a thread beside the main one does: its own work, or waits for other ranks. The main thread asks."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class _State:
    """Replaced as a whole, as another thread reads it."""

    waits_for: "str | SideThread | None"
    since: float
    waited: float
    """Seconds, until `since`."""
    other_waited: float = 0.0
    """What the thread that this one waits for had waited itself, at `since`."""


class SideThread:
    def __init__(self, work: str, clock: Clock = time.monotonic) -> None:
        """`work`: its own, in words."""
        self.work, self._clock = work, clock
        self._state = _State(None, clock(), 0.0)
        self.stalled = 0.0
        """Seconds that the main thread has waited for this one; the main thread counts them."""

    @contextmanager
    def wait(self, what: str) -> Iterator[None]:
        """Around a wait for other ranks. That thread calls it."""
        self._state = _State(what, self._clock(), self._state.waited)
        try:
            yield
        finally:
            self._state = _State(None, self._clock(), self.waited())

    @contextmanager
    def wait_behind(self, other: "SideThread") -> Iterator[None]:
        """Around a wait for another thread of this rank: this one waits for other ranks while that one does."""
        self._state = _State(other, self._clock(), self._state.waited, other.waited())
        try:
            yield
        finally:
            self._state = _State(None, self._clock(), self.waited())

    def waited(self) -> float:
        """Seconds of waiting for other ranks, so far."""
        state = self._state
        if isinstance(state.waits_for, SideThread):
            return state.waited + state.waits_for.waited() - state.other_waited
        return state.waited + (0.0 if state.waits_for is None else self._clock() - state.since)

    def now(self) -> tuple[str | None, float]:
        """What it waits for (None: it works), and since when."""
        state = self._state
        if isinstance(state.waits_for, SideThread):
            what, since = state.waits_for.now()
            return what, max(since, state.since)
        return state.waits_for, state.since

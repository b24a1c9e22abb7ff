"""Whether a thread beside the main one works or waits for other ranks: the main thread looks while it joins it."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

Clock = Callable[[], float]
"""A clock, in seconds from any fixed moment."""


@dataclass(frozen=True, slots=True)
class _State:
    """What a thread is at. It is replaced as a whole, as another thread reads it."""

    waits_for: "str | SideThread | None"
    """What the thread waits for: other ranks, in words, or another thread. None: it works."""
    since: float
    waited: float
    """Seconds of waiting for other ranks, until `since`."""
    other_waited: float = 0.0
    """Seconds that the thread which this one waits for had waited itself, at `since`."""


class SideThread:
    """A thread beside the main one. It calls `waiting` and `waiting_behind` itself; the main thread reads the rest."""

    def __init__(self, work: str, clock: Clock = time.monotonic) -> None:
        """`work`: what it works at, in words."""
        self.work, self._clock = work, clock
        self._state = _State(None, clock(), 0.0)
        self.stalled_seconds = 0.0
        """Seconds for which the main thread has waited to join this one. Only the main thread changes it."""

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """A context around a wait of this thread for other ranks."""
        self._state = _State(what, self._clock(), self._state.waited)
        try:
            yield
        finally:
            self._works()

    @contextmanager
    def waiting_behind(self, other: "SideThread") -> Iterator[None]:
        """A context around a wait for another thread of this rank: it is a wait for other ranks as long as that thread
        waits for them."""
        self._state = _State(other, self._clock(), self._state.waited, other.waited_seconds())
        try:
            yield
        finally:
            self._works()

    def waited_seconds(self) -> float:
        """Seconds of waiting for other ranks, so far."""
        state = self._state
        if isinstance(state.waits_for, SideThread):
            return state.waited + state.waits_for.waited_seconds() - state.other_waited
        return state.waited + (0.0 if state.waits_for is None else self._clock() - state.since)

    def waits_for(self) -> tuple[str | None, float]:
        """What it waits for (None: it works), and since when."""
        state = self._state
        if isinstance(state.waits_for, SideThread):
            what, since = state.waits_for.waits_for()
            return what, max(since, state.since)
        return state.waits_for, state.since

    def _works(self) -> None:
        self._state = _State(None, self._clock(), self.waited_seconds())

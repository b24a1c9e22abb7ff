"""State of a thread beside the main one: whether it works or waits for other ranks. The main thread reads it while it
joins the thread."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

Clock = Callable[[], float]
"""A clock, in seconds from any fixed moment."""


@dataclass(frozen=True, slots=True)
class _State:
    """State of a thread. Replaced as a whole, because another thread reads it."""

    waits_for: "str | SideThread | None"
    """Target of the wait: other ranks, as a description, or another thread. None: the thread works."""
    since: float
    waited: float
    """Total seconds of waiting for other ranks, until `since`."""
    other_waited: float = 0.0
    """Total seconds that the awaited thread had itself waited for other ranks, at `since`."""


class SideThread:
    """A thread beside the main one. The thread itself calls `waiting` and `waiting_behind`; the main thread calls the
    rest."""

    def __init__(self, work: str, clock: Clock = time.monotonic) -> None:
        """`work`: description of the thread's work."""
        self.work, self._clock = work, clock
        self._state = _State(None, clock(), 0.0)
        self.stalled_seconds = 0.0
        """Total seconds that the main thread has waited for this thread. Only the main thread changes it."""

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Context for a wait of this thread for other ranks."""
        self._state = _State(what, self._clock(), self._state.waited)
        try:
            yield
        finally:
            self._works()

    @contextmanager
    def waiting_behind(self, other: "SideThread") -> Iterator[None]:
        """Context for a wait for another thread of this rank. It counts as a wait for other ranks while that thread
        waits for them."""
        self._state = _State(other, self._clock(), self._state.waited, other.waited_seconds())
        try:
            yield
        finally:
            self._works()

    def waited_seconds(self) -> float:
        """Return the total seconds of waiting for other ranks."""
        state = self._state
        if isinstance(state.waits_for, SideThread):
            return state.waited + state.waits_for.waited_seconds() - state.other_waited
        return state.waited + (0.0 if state.waits_for is None else self._clock() - state.since)

    def waits_for(self) -> tuple[str | None, float]:
        """Return the description of the wait, None if the thread works, and the time since which it holds."""
        state = self._state
        if isinstance(state.waits_for, SideThread):
            what, since = state.waits_for.waits_for()
            return what, max(since, state.since)
        return state.waits_for, state.since

    def _works(self) -> None:
        self._state = _State(None, self._clock(), self.waited_seconds())

"""Prefetching of the data of the next steps, on a thread of its own."""

import threading
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Generic, Self, TypeVar

AHEAD = 2
"""Number of steps prepared in advance."""

T = TypeVar("T")


class Prefetch(Generic[T]):
    """Runs `make` for consecutive cursors in advance, on a thread of its own.

    Each result is made once and handed over to the caller, who then owns the result: nothing is shared. Resources used
    by `make`, such as files, belong to the thread until `close` has returned.

    If the context ends with an exception, `__exit__` does not wait for the thread: a read may hang for as long as a
    server does not answer, which would delay the report of the error.
    """

    def __init__(self, make: Callable[[int], T], first: int, stride: int, ahead: int = AHEAD) -> None:
        """`make`: returns the result for a cursor. `first`: the first cursor. `stride`: distance between cursors.
        `ahead`: maximum number of results kept ready."""
        self._make, self._next, self._stride, self._ahead = make, first, stride, ahead
        self._ready: deque[T] = deque()
        self._error: BaseException | None = None
        self._closed = False
        # Held while `_ready`, `_error` or `_closed` changes; notified afterwards.
        self._changed = threading.Condition()
        self.waited_seconds = 0.0
        """Seconds that `take` has waited so far."""
        self._thread = threading.Thread(target=self._run, args=(first,), name="prefetch", daemon=True)
        self._thread.start()

    def take(self, cursor: int) -> T:
        """Return the result for `cursor`, which must be the next one. If `make` failed, raises its error once all
        earlier results are taken, and again in every later call."""
        assert cursor == self._next, f"results are taken in order: next is {self._next}, not {cursor}"
        begin = time.monotonic()
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._error or self._closed)
            self.waited_seconds += time.monotonic() - begin
            if self._ready:
                self._next += self._stride
                self._changed.notify_all()
                return self._ready.popleft()
        assert self._error is not None, "`take` is not called after `close`"
        raise self._error

    def close(self, *, wait: bool = True) -> None:
        """Stop the thread, which may still be making a last result. `wait`: whether to join it."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if wait:
            self._thread.join()

    def _run(self, cursor: int) -> None:
        try:
            while self._has_room():
                made = self._make(cursor)
                cursor += self._stride
                with self._changed:
                    self._ready.append(made)
                    self._changed.notify_all()
                del made  # the caller owns the result; this frame would keep it alive while it waits for room
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _has_room(self) -> bool:
        """Wait until another result may be made. Return False once the object is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._ready) < self._ahead)
            return not self._closed

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close(wait=kind is None)

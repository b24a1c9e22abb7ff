"""Makes what the next steps train on, in a thread beside training."""

import threading
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Generic, Self, TypeVar

AHEAD = 2
"""Steps whose results are ready before they are asked for."""

T = TypeVar("T")


class Prefetch(Generic[T]):
    """The results of `make` for one cursor after the other. Each is made once, in the one thread that this object
    starts, is handed over once, and is then the caller's alone: nothing is shared. What `make` uses, files for
    instance, belongs to the thread until `close` has returned.

    A context that ends with an exception does not wait for the thread: a read may hang for as long as a server does
    not answer, and whoever waits for it cannot say what has failed."""

    def __init__(self, make: Callable[[int], T], first: int, stride: int, ahead: int = AHEAD) -> None:
        """`make`: takes a cursor. `first`: the first cursor; `stride`: from one to the next. `ahead`: results that
        wait at most."""
        self._make, self._next, self._stride, self._ahead = make, first, stride, ahead
        self._ready: deque[T] = deque()
        self._error: BaseException | None = None
        self._closed = False
        self._changed = threading.Condition()
        self.waited_seconds = 0.0
        """Seconds for which `take` has waited so far."""
        self._thread = threading.Thread(target=self._run, args=(first,), name="prefetch", daemon=True)
        self._thread.start()

    def take(self, cursor: int) -> T:
        """The result for the cursor, which must be the next one. Raises what `make` raised for it, then and whenever
        asked again."""
        assert cursor == self._next, (cursor, self._next)
        begin = time.monotonic()
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._error or self._closed)
            self.waited_seconds += time.monotonic() - begin
            if self._ready:
                self._next += self._stride
                self._changed.notify_all()
                return self._ready.popleft()
        assert self._error is not None, "closed"
        raise self._error

    def close(self, *, wait: bool = True) -> None:
        """End the thread, which may be making a last result. `wait`: whether to wait for its end."""
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
                del made
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _has_room(self) -> bool:
        """Waits until another result may be made; False: none is wanted any more."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._ready) < self._ahead)
            return not self._closed

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close(wait=kind is None)

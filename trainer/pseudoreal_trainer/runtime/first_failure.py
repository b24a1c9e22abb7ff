"""First failure of any thread of a rank. This failure ends the process, even while other threads wait."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

End = Callable[[BaseException], object]


class FirstFailure:
    """Record of the first failure of a rank. Every thread other than the main thread works inside `noticed`. The main
    thread calls `check` whenever it waits for another thread.

    A thread cannot be woken while it waits for another rank, and the other rank may be waiting for the failed thread.
    So a process that trains sets an `End` that does not return. The thread that fails first reports the reason and ends
    the process. Other ranks then see a broken connection.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._end: End | None = None

    def ends_with(self, end: End) -> None:
        """Set the function that ends the process. The thread that fails first calls the function once, with its
        failure."""
        self._end = end

    def add(self, error: BaseException) -> None:
        """Record a failure. Only the first failure counts: other threads wait here until the thread that failed first
        has ended the process."""
        with self._lock:
            if self._error is None:
                self._error = error
                if self._end is not None:
                    self._end(error)

    def check(self) -> None:
        """Raise the first failure, if there is one."""
        if self._error is not None:
            raise self._error

    @contextmanager
    def noticed(self) -> Iterator[None]:
        """Record and re-raise a failure of the work in the context. If another thread has failed already, raise that
        failure before the work starts."""
        self.check()
        try:
            yield
        except BaseException as error:
            self.add(error)
            raise

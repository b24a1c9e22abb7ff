"""The first failure of any thread of a rank. With it the rank ends, whatever its other threads wait for."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

End = Callable[[BaseException], object]


class FirstFailure:
    """The first failure of a rank. Every thread beside the main one works inside `noticed`; every wait for such a
    thread looks at `check`.

    A thread cannot be woken while it waits for another rank, and the other rank may wait for the thread that failed. So
    a process that trains hands in an `End` which does not return: the thread that fails first says why and ends the
    process, and other ranks see their connection to it break.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._end: End | None = None

    def ends_with(self, end: End) -> None:
        """Sets what ends the process: `end` is called once, with the first failure, in the thread that failed."""
        self._end = end

    def add(self, error: BaseException) -> None:
        """Notes a failure. Only the first one counts; other threads wait here until its thread has ended the
        process."""
        with self._lock:
            if self._error is None:
                self._error = error
                if self._end is not None:
                    self._end(error)

    def check(self) -> None:
        """Raises the first failure, if there is one."""
        if self._error is not None:
            raise self._error

    @contextmanager
    def noticed(self) -> Iterator[None]:
        """A context around each piece of work of a thread beside the main one: nothing begins after a failure."""
        self.check()
        try:
            yield
        except BaseException as error:
            self.add(error)
            raise

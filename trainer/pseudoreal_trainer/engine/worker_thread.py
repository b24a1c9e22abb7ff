"""A worker thread that runs tasks in the order in which they are submitted, until the rank fails."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from pseudoreal_trainer.runtime.first_failure import FirstFailure

_T = TypeVar("_T")


class WorkerThread:
    """A thread with a FIFO queue of tasks."""

    def __init__(self, name: str, failure: FirstFailure, enter: Callable[[], None] = lambda: None) -> None:
        """`enter`: called first in the thread."""
        self._thread, self._failure = ThreadPoolExecutor(1, name, initializer=enter), failure

    def submit(self, task: Callable[[], _T]) -> Future[_T]:
        """Submit a task to the thread and return its future. The future always completes; after a failure of the rank
        it raises that failure."""

        def run() -> _T:
            with self._failure.noticed():
                return task()

        return self._thread.submit(run)

    def close(self, *, wait: bool = True) -> None:
        """End the thread. `wait`: whether to wait until all tasks are done."""
        self._thread.shutdown(wait=wait)

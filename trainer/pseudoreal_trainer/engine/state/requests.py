"""Disk requests, many at a time: one after the other, they would leave a fast disk idle most of the time."""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue

DEPTH = 16
"""Number of requests that one caller has in flight at a time."""
_CALLERS = 2
"""Number of threads that read or write chunks at the same time."""
_STACK = 512 << 10
"""Stack of a thread in bytes: the usual 8 MiB count as data of the process, if that is limited."""

Request = Callable[[], None]


class Requests:
    """Threads that run requests; started when first needed."""

    def __init__(self) -> None:
        self._given: SimpleQueue[tuple[Request, Future[None]] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._starting = threading.Lock()

    def run(self, requests: Sequence[Request]) -> None:
        """Run all requests. Raises the first failure, once no request is in flight: their buffers are free in any
        case."""
        if len(requests) == 1:
            requests[0]()
            return
        self._start()
        under_way: deque[Future[None]] = deque()
        failures: list[BaseException | None] = []
        for request in requests:
            if len(under_way) == DEPTH:
                failures.append(under_way.popleft().exception())
            if any(failures):
                break
            under_way.append(self._give(request))
        failures += [future.exception() for future in under_way]
        for failure in failures:
            if failure is not None:
                raise failure

    def close(self) -> None:
        for _ in self._threads:
            self._given.put(None)
        for thread in self._threads:
            thread.join()

    def _give(self, request: Request) -> Future[None]:
        done: Future[None] = Future()
        self._given.put((request, done))
        return done

    def _start(self) -> None:
        with self._starting:
            if self._threads:
                return
            usual = threading.stack_size(_STACK)
            try:
                for number in range(DEPTH * _CALLERS):
                    thread = threading.Thread(target=self._work, name=f"disk-{number}", daemon=True)
                    thread.start()
                    self._threads.append(thread)
            finally:
                threading.stack_size(usual)

    def _work(self) -> None:
        while (given := self._given.get()) is not None:
            request, done = given
            try:
                request()
            except BaseException as failure:
                done.set_exception(failure)
            else:
                done.set_result(None)

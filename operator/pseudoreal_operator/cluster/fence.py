"""Write fence: the holder of the Lease may write only while no other operator can hold the Lease.

The right to write has a deadline, which each renewal of the Lease extends. The deadline is checked last, on an
established connection right before the request is sent, because a process may be stopped at any moment and continue
minutes later.
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from aiohttp import ClientError, ClientHandlerType, ClientRequest, ClientResponse
from aiohttp.connector import Connection

_READS = ("GET", "HEAD", "OPTIONS")


class NotLeading(ClientError):
    """A write was not sent: another operator may hold the Lease by now."""


def boot_seconds() -> float:
    """Return the seconds since boot, including suspension of the machine: the Lease also expires during a
    suspension."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Fence:
    """The write fence: open until a deadline, closed at first. `clock`: returns the time in seconds."""

    def __init__(self, clock: Callable[[], float] = boot_seconds) -> None:
        self._clock = clock
        self._until = -math.inf
        self._last_unanswered = -math.inf
        """Time at which a write last ended without an answer, by `clock`; -inf: never."""

    def now(self) -> float:
        return self._clock()

    def open_until(self, moment: float) -> None:
        self._until = moment

    def close(self) -> None:
        self._until = -math.inf

    @property
    def is_open(self) -> bool:
        return self._clock() < self._until

    def check(self) -> None:
        """Raise NotLeading if the fence is closed."""
        if not self.is_open:
            raise NotLeading("this operator does not hold the Lease, or has not renewed it in time: it writes nothing")

    def has_answers_for(self, seconds: float) -> bool:
        """Return whether every write of the last `seconds` was answered. A write without an answer may still arrive."""
        return self._clock() - self._last_unanswered >= seconds

    @contextmanager
    def track_write(self) -> Iterator[None]:
        """Context for one write: check the fence, and record the time if the write ends without an answer. Raises
        NotLeading if the fence is closed."""
        self.check()
        try:
            yield
        except NotLeading:
            raise  # the request was not sent
        except BaseException:  # also a cancellation: the request may be on its way
            self._last_unanswered = self._clock()
            raise

    async def guard(self, request: ClientRequest, send: ClientHandlerType) -> ClientResponse:
        """Middleware of the client: send reads as they are, and writes inside `track_write`."""
        if request.method in _READS:
            return await send(request)
        with self.track_write():
            return await send(request)

    def request_class(self) -> type[ClientRequest]:
        """Return a request class that checks the fence after its connection is established, right before a write is
        sent."""
        fence = self

        class Fenced(ClientRequest):
            async def send(self, conn: Connection) -> ClientResponse:
                # Check again after `guard`: the right to write may have expired while the request waited for a
                # connection.
                if self.method not in _READS:
                    fence.check()
                return await super().send(conn)

        return Fenced

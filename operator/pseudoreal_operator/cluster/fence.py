"""Who may write: the holder of the Lease, while nobody else can have it.

The right to write has an end that each renewal moves on. It is looked at last of all, when the connection stands and
the request is about to go out, for a process may be stopped at any moment and go on after minutes.
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from aiohttp import ClientError, ClientHandlerType, ClientRequest, ClientResponse
from aiohttp.connector import Connection

_READS = ("GET", "HEAD", "OPTIONS")


class NotLeading(ClientError):
    """A write that is not sent: another operator may hold the Lease by now."""


def boot_seconds() -> float:
    """Seconds since the machine started, those among them for which it was suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Fence:
    """Closed at first. `clock` counts seconds."""

    def __init__(self, clock: Callable[[], float] = boot_seconds) -> None:
        self._clock = clock
        self._until = -math.inf
        self._unanswered = -math.inf
        """When the fate of a write became unknown last."""

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
        """Raises NotLeading."""
        if not self.is_open:
            raise NotLeading("this operator does not hold the Lease, or has not renewed it in time: it writes nothing")

    def settled_for(self, seconds: float) -> bool:
        """Whether every write of the last `seconds` has its answer. One that has none may still arrive."""
        return self._clock() - self._unanswered >= seconds

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Surrounds a write until its answer comes. Raises NotLeading."""
        self.check()
        try:
            yield
        except NotLeading:
            raise
        except BaseException:
            self._unanswered = self._clock()
            raise

    async def guard(self, request: ClientRequest, send: ClientHandlerType) -> ClientResponse:
        """A middleware that surrounds every write."""
        if request.method in _READS:
            return await send(request)
        with self.writing():
            return await send(request)

    def requests(self) -> type[ClientRequest]:
        """Requests that look at the fence when their connection stands."""
        fence = self

        class Fenced(ClientRequest):
            async def send(self, conn: Connection) -> ClientResponse:
                if self.method not in _READS:
                    fence.check()
                return await super().send(conn)

        return Fenced

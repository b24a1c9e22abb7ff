"""Accepts connections for the endpoint, within bounds, and keeps connections that bring valid tokens.

A connection is a stranger until it brings a valid token, for STRANGER_SECONDS at most; `strangers` has the limits for
strangers. A silent connection costs only a file descriptor; its TLS handshake, which occupies the event loop for a
millisecond, waits its turn. With a valid token the connection belongs to its pod, which has one at a time.
"""

import asyncio
import resource
import socket
import ssl
from asyncio.sslproto import SSLProtocol
from collections import OrderedDict
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager

import structlog
from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from pseudoreal_operator.endpoint import unauthenticated
from pseudoreal_operator.endpoint.limits import Limiter
from pseudoreal_operator.endpoint.unauthenticated import Stranger, Strangers
from pseudoreal_operator.metrics.registry import CONNECTIONS, HANDSHAKES_FAILED, REFUSED_CONNECTIONS
from pseudoreal_operator.observe.report_store import ReportingPod
from pseudoreal_operator.sockets import listening_socket

MOST_CONNECTIONS = 4000
"""Maximum number of connections of pods with valid tokens; beyond it, the connection that was silent for longest is
closed."""
STRANGER_SECONDS = 10.0
"""Maximum seconds from a connection to its first valid token."""
HANDSHAKE_SECONDS = 5.0
PER_SECOND, AT_ONCE = 100, 200
"""Limits on handshakes of all clients together that lead to no valid token, because handshakes occupy the event
loop."""
IDLE_SECONDS = 15.0
"""Seconds of silence after which a connection is closed: pods report every few seconds."""
_OTHER_FILES = 512
"""File descriptors that are left to the rest of the operator."""
_MOST_FILES = 16_384
_TLS_BUFFER_BYTES = 16 * 1024
"""Size of asyncio's buffer for each TLS connection. By default it has 256 KiB, filled with zeros, and no public setting
makes it smaller: a thousand reporting pods would take 270 MB. A TLS record has at most 16 KiB, so no read at a time
needs more."""

log = structlog.get_logger()


class Listener:
    """The listening socket and its connections: strangers, and at most one connection per pod."""

    def __init__(self, tls: ssl.SSLContext) -> None:
        # For all later connections of the process, including connections to the API server.
        SSLProtocol.max_size = _TLS_BUFFER_BYTES
        self._tls = tls
        files = _files()
        self._strangers = Strangers(min(unauthenticated.MOST, files // 3))
        self._most = min(MOST_CONNECTIONS, files * 2 // 3)
        self._pace = Limiter(PER_SECOND, AT_ONCE)
        self._complaints = Limiter(per_second=0.1, burst=1)
        self._tasks: set[asyncio.Task[None]] = set()
        self._turns: dict[Stranger, asyncio.Future[None]] = {}
        """Strangers that wait for their handshakes -> future of their turn."""
        self._asked = asyncio.Event()
        """Set when a stranger may have a handshake."""
        self._meeting: dict[RequestHandler, asyncio.Future[None]] = {}
        """Connections of strangers -> future that a valid token resolves."""
        self._reporters: OrderedDict[ReportingPod, RequestHandler] = OrderedDict()
        """Pods -> their connections; the pod that was silent for longest comes first."""
        CONNECTIONS.labels(known="false").set_function(lambda: len(self._strangers))
        CONNECTIONS.labels(known="true").set_function(lambda: len(self._reporters))

    @asynccontextmanager
    async def listening(self, server: web.Server, port: int) -> AsyncIterator[int]:
        """Listen, and hand accepted connections to `server`. Yield the port; a free one if `port` is 0."""
        with listening_socket(port) as listening:
            listening.setblocking(False)
            self._start(self._accept(listening, server))
            self._start(self._give_turns())
            try:
                yield listening.getsockname()[1]
            finally:
                for task in self._tasks:
                    task.cancel()
                await asyncio.gather(*self._tasks, return_exceptions=True)

    def recognize(self, handler: RequestHandler, reporter: ReportingPod) -> None:
        """Note that a connection has brought the valid token of a pod, and close the pod's previous connection."""
        if (meeting := self._meeting.get(handler)) is not None and not meeting.done():
            meeting.set_result(None)
        before = self._reporters.pop(reporter, None)
        if before is not None and before is not handler:
            before.force_close()
        if _is_open(handler):
            self._reporters[reporter] = handler
        while self._reporters and (len(self._reporters) > self._most or not _is_open(self._most_silent())):
            self._reporters.popitem(last=False)[1].force_close()

    def _most_silent(self) -> RequestHandler:
        return next(iter(self._reporters.values()))

    async def _accept(self, listening: socket.socket, server: web.Server) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, address = await loop.sock_accept(listening)
            # No file descriptor left, or a connection that broke at once.
            except OSError as error:
                self._complain(str(error))
                await asyncio.sleep(1)
                continue
            stranger = Stranger(address[0])
            if not self._strangers.enter(stranger):
                REFUSED_CONNECTIONS.inc()
                self._complain(f"too many connections of {address[0]}")
                connection.close()
                continue
            stranger.close = self._start(self._meet(connection, server, stranger)).cancel
            # Let the task start, so that it closes the connection in any case, and let other tasks run.
            await asyncio.sleep(0)

    async def _meet(self, connection: socket.socket, server: web.Server, stranger: Stranger) -> None:
        """Serve a connection until it has brought a valid token; close it if it brings none."""
        known = asyncio.get_running_loop().create_future()
        handler: RequestHandler | None = None
        transport: asyncio.BaseTransport | None = None
        try:
            async with asyncio.timeout(STRANGER_SECONDS):
                await _has_spoken(connection)
                async with self._turn(stranger):
                    self._meeting[handler := server()] = known
                    transport = await self._shake_hands(connection, handler)
                await known
        except (OSError, TimeoutError):
            pass
        finally:
            if handler is not None:
                self._meeting.pop(handler, None)
            is_known = known.done() and not known.cancelled()
            self._strangers.leave(stranger, known=is_known)
            if is_known:
                self._pace.give_back("all")
            elif isinstance(transport, asyncio.Transport):
                transport.abort()
            else:
                connection.close()

    async def _shake_hands(self, connection: socket.socket, handler: RequestHandler) -> asyncio.BaseTransport:
        try:
            transport, _ = await asyncio.get_running_loop().connect_accepted_socket(
                lambda: handler, connection, ssl=self._tls, ssl_handshake_timeout=HANDSHAKE_SECONDS
            )
        except OSError as error:
            HANDSHAKES_FAILED.labels(reason=_reason_of(error)).inc()
            raise
        return transport

    @asynccontextmanager
    async def _turn(self, stranger: Stranger) -> AsyncIterator[None]:
        """Wait for the turn of a stranger; its handshake runs in this context."""
        turn = self._turns[stranger] = asyncio.get_running_loop().create_future()
        self._strangers.ask(stranger)
        self._asked.set()
        try:
            await turn
            yield
        finally:
            del self._turns[stranger]
            if turn.done() and not turn.cancelled():
                self._strangers.shaken(stranger)
                self._asked.set()

    async def _give_turns(self) -> None:
        while True:
            await self._asked.wait()
            if not self._pace.allows("all"):
                await asyncio.sleep(1 / PER_SECOND)
                continue
            stranger = self._strangers.next()
            if stranger is None:
                self._asked.clear()
                self._pace.give_back("all")
            elif (turn := self._turns[stranger]).done():
                self._strangers.shaken(stranger)  # it timed out while it waited
                self._pace.give_back("all")
            else:
                turn.set_result(None)

    def _start(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _complain(self, why: str) -> None:
        if self._complaints.allows("all"):
            log.warning("connection_refused", error=why)


async def _has_spoken(connection: socket.socket) -> None:
    """Wait until the client has sent something, or closed the connection."""
    loop = asyncio.get_running_loop()
    spoken = asyncio.Event()
    loop.add_reader(connection, spoken.set)
    try:
        await spoken.wait()
    finally:
        loop.remove_reader(connection)


def _is_open(handler: RequestHandler) -> bool:
    return handler.transport is not None


def _reason_of(error: OSError) -> str:
    """Return why a handshake failed, as one of three metric labels."""
    said = error.reason or "" if isinstance(error, ssl.SSLError) else ""
    # Alerts of a client that does not know the CA, or finds another fault in the certificate.
    if "UNKNOWN_CA" in said or "CERTIFICATE" in said:
        return "untrusted"
    return "silent" if isinstance(error, ConnectionAbortedError | TimeoutError) else "other"


def _files() -> int:
    """Raise the limit on open files as far as the system allows; return how many connections may use."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_FILES if hard == resource.RLIM_INFINITY else min(_MOST_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        soft = most
    return max(96, (_MOST_FILES if soft == resource.RLIM_INFINITY else soft) - _OTHER_FILES)

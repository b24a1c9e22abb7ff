"""Accepts connections for the endpoint, within bounds, and keeps connections that bring valid tokens.

A connection is unauthenticated until it brings a valid token, for AUTHENTICATION_SECONDS at most; `unauthenticated` has
the limits until then. A silent connection costs only a file descriptor. TLS handshakes take turns, because a handshake
occupies the event loop for a millisecond. A connection with a valid token belongs to its pod; a pod has one connection
at a time.
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
from pseudoreal_operator.endpoint.unauthenticated import UnauthenticatedConnection, UnauthenticatedConnections
from pseudoreal_operator.metrics.registry import CONNECTIONS, HANDSHAKES_FAILED, REFUSED_CONNECTIONS
from pseudoreal_operator.observe.report_store import ReportingPod
from pseudoreal_operator.sockets import listening_socket

MOST_CONNECTIONS = 4000
"""Maximum number of connections of pods with valid tokens; beyond it, the connection that was silent for longest is
closed."""
AUTHENTICATION_SECONDS = 10.0
"""Maximum seconds from a connection to its first valid token."""
HANDSHAKE_SECONDS = 5.0
PER_SECOND, AT_ONCE = 100, 200
"""Limits on handshakes that lead to no valid token, of all clients together: handshakes per second, and burst.
Handshakes occupy the event loop."""
IDLE_SECONDS = 15.0
"""Seconds of silence after which a connection is closed: pods report every few seconds."""
_RESERVED_FILES = 512
"""File descriptors that are left to the rest of the operator."""
_MOST_FILES = 16_384
_TLS_BUFFER_BYTES = 16 * 1024
"""Size in bytes of asyncio's buffer for each TLS connection. By default the buffer has 256 KiB, filled with zeros, and
no public setting makes it smaller: a thousand reporting pods would take 270 MB. A TLS record has at most 16 KiB, so no
single read needs more."""

log = structlog.get_logger()


class Listener:
    """The listening socket and its connections: unauthenticated connections, and at most one connection per pod."""

    def __init__(self, tls: ssl.SSLContext) -> None:
        # Applies to all later TLS connections of the process, including connections to the API server.
        SSLProtocol.max_size = _TLS_BUFFER_BYTES
        self._tls = tls
        files = _raise_file_limit()
        self._unauthenticated = UnauthenticatedConnections(min(unauthenticated.MOST, files // 3))
        self._most = min(MOST_CONNECTIONS, files * 2 // 3)
        self._handshake_rate = Limiter(PER_SECOND, AT_ONCE)
        self._log_limit = Limiter(per_second=0.1, burst=1)
        self._tasks: set[asyncio.Task[None]] = set()
        self._turns: dict[UnauthenticatedConnection, asyncio.Future[None]] = {}
        """Connections that wait for their handshakes -> future of their turn."""
        self._handshake_requested = asyncio.Event()
        """Set when another handshake may start."""
        self._authenticating: dict[RequestHandler, asyncio.Future[None]] = {}
        """Unauthenticated connections -> future that a valid token resolves."""
        self._reporters: OrderedDict[ReportingPod, RequestHandler] = OrderedDict()
        """Pods -> their connections; the pod that was silent for longest comes first."""
        CONNECTIONS.labels(known="false").set_function(lambda: len(self._unauthenticated))
        CONNECTIONS.labels(known="true").set_function(lambda: len(self._reporters))

    @asynccontextmanager
    async def listen(self, server: web.Server, port: int) -> AsyncIterator[int]:
        """Listen, and hand accepted connections to `server`. Yield the port in use. `port` 0: a free port."""
        with listening_socket(port) as listening:
            listening.setblocking(False)
            self._start(self._accept(listening, server))
            self._start(self._schedule_handshakes())
            try:
                yield listening.getsockname()[1]
            finally:
                for task in self._tasks:
                    task.cancel()
                await asyncio.gather(*self._tasks, return_exceptions=True)

    def recognize(self, handler: RequestHandler, reporter: ReportingPod) -> None:
        """Note that a connection has brought the valid token of a pod, and close the pod's previous connection."""
        if (authenticated := self._authenticating.get(handler)) is not None and not authenticated.done():
            authenticated.set_result(None)
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
                accepted, address = await loop.sock_accept(listening)
            # No file descriptor left, or a connection that broke at once.
            except OSError as error:
                self._log_rarely(str(error))
                await asyncio.sleep(1)
                continue
            connection = UnauthenticatedConnection(address[0])
            if not self._unauthenticated.admit(connection):
                REFUSED_CONNECTIONS.inc()
                self._log_rarely(f"too many connections of {address[0]}")
                accepted.close()
                continue
            connection.close = self._start(self._authenticate(accepted, server, connection)).cancel
            # Let the task start, so that it closes the connection in any case, and let other tasks run.
            await asyncio.sleep(0)

    async def _authenticate(
        self, accepted: socket.socket, server: web.Server, connection: UnauthenticatedConnection
    ) -> None:
        """Serve a connection until it has brought a valid token; close it if it brings none."""
        authenticated = asyncio.get_running_loop().create_future()
        handler: RequestHandler | None = None
        transport: asyncio.BaseTransport | None = None
        try:
            async with asyncio.timeout(AUTHENTICATION_SECONDS):
                await _wait_for_data(accepted)
                async with self._turn(connection):
                    # Register the handler before the handshake: a request, and so `recognize`, may follow at once after
                    # the handshake.
                    self._authenticating[handler := server()] = authenticated
                    transport = await self._start_tls(accepted, handler)
                await authenticated
        except (OSError, TimeoutError):
            pass
        finally:
            if handler is not None:
                self._authenticating.pop(handler, None)
            is_authenticated = authenticated.done() and not authenticated.cancelled()
            self._unauthenticated.remove(connection, authenticated=is_authenticated)
            if is_authenticated:
                self._handshake_rate.give_back("all")
            elif isinstance(transport, asyncio.Transport):
                transport.abort()
            else:
                accepted.close()

    async def _start_tls(self, accepted: socket.socket, handler: RequestHandler) -> asyncio.BaseTransport:
        try:
            transport, _ = await asyncio.get_running_loop().connect_accepted_socket(
                lambda: handler, accepted, ssl=self._tls, ssl_handshake_timeout=HANDSHAKE_SECONDS
            )
        except OSError as error:
            HANDSHAKES_FAILED.labels(reason=_reason_of(error)).inc()
            raise
        return transport

    @asynccontextmanager
    async def _turn(self, connection: UnauthenticatedConnection) -> AsyncIterator[None]:
        """Wait for the turn of a connection; its handshake runs in this context."""
        turn = self._turns[connection] = asyncio.get_running_loop().create_future()
        self._unauthenticated.request_handshake(connection)
        self._handshake_requested.set()
        try:
            await turn
            yield
        finally:
            del self._turns[connection]
            if turn.done() and not turn.cancelled():
                self._unauthenticated.end_handshake(connection)
                self._handshake_requested.set()

    async def _schedule_handshakes(self) -> None:
        while True:
            await self._handshake_requested.wait()
            if not self._handshake_rate.allows("all"):
                await asyncio.sleep(1 / PER_SECOND)
                continue
            connection = self._unauthenticated.start_next_handshake()
            if connection is None:
                self._handshake_requested.clear()
                self._handshake_rate.give_back("all")
            elif (turn := self._turns[connection]).done():
                self._unauthenticated.end_handshake(connection)  # it timed out while it waited
                self._handshake_rate.give_back("all")
            else:
                turn.set_result(None)

    def _start(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _log_rarely(self, why: str) -> None:
        if self._log_limit.allows("all"):
            log.warning("connection_rejected", error=why)


async def _wait_for_data(accepted: socket.socket) -> None:
    """Wait until the client has sent something, or closed the connection."""
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(accepted, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(accepted)


def _is_open(handler: RequestHandler) -> bool:
    return handler.transport is not None


def _reason_of(error: OSError) -> str:
    """Return why a handshake failed, as one of three metric labels."""
    reason = error.reason or "" if isinstance(error, ssl.SSLError) else ""
    # Alerts of a client that does not know the CA, or finds another fault in the certificate.
    if "UNKNOWN_CA" in reason or "CERTIFICATE" in reason:
        return "untrusted"
    return "silent" if isinstance(error, ConnectionAbortedError | TimeoutError) else "other"


def _raise_file_limit() -> int:
    """Raise the limit on open files, up to _MOST_FILES or the system's maximum; return the number of files for
    connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_FILES if hard == resource.RLIM_INFINITY else min(_MOST_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        soft = most
    return max(96, (_MOST_FILES if soft == resource.RLIM_INFINITY else soft) - _RESERVED_FILES)

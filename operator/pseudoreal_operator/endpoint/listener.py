"""Takes connections for the endpoint, within bounds. A client that opens many, or opens them and says nothing, neither
silences the others for long nor keeps the operator's loop busy with handshakes."""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager

import structlog
from aiohttp import web

from pseudoreal_operator.endpoint.limits import Limiter
from pseudoreal_operator.endpoint.tls_buffers import take_small_buffers
from pseudoreal_operator.sockets import listening_socket

MOST_CONNECTIONS = 4000
MOST_HANDSHAKES = 50
"""Most handshakes at a time."""
PER_SECOND, AT_ONCE = 10, 200
"""Limits on new connections of one address. Behind it there may be many pods: each has one connection for as long as it
reports."""
HANDSHAKE_SECONDS = 5.0
IDLE_SECONDS = 15.0
"""Seconds of silence after which a connection is closed: a pod reports every few seconds."""

log = structlog.get_logger()


class Listener:
    def __init__(self, tls: ssl.SSLContext) -> None:
        take_small_buffers()
        self._tls = tls
        self._limiter = Limiter(PER_SECOND, AT_ONCE)
        self._complaints = Limiter(per_second=0.1, burst=1)
        self._tasks: set[asyncio.Task[None]] = set()
        self._handshakes = 0

    @asynccontextmanager
    async def listening(self, server: web.Server, port: int) -> AsyncIterator[int]:
        """Listens, and hands what it takes to `server`: the port; a free one where 0 was asked for."""
        with listening_socket(port) as listening:
            listening.setblocking(False)
            self._start(self._accept(listening, server))
            try:
                yield listening.getsockname()[1]
            finally:
                for task in self._tasks:
                    task.cancel()
                await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, listening: socket.socket, server: web.Server) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, address = await loop.sock_accept(listening)
            # No more files, or a connection that broke at once.
            except OSError as error:
                self._complain(str(error))
                await asyncio.sleep(1)
                continue
            full = self._handshakes >= MOST_HANDSHAKES or len(server.connections) >= MOST_CONNECTIONS
            if full or not self._limiter.allows(address[0]):
                self._complain(f"too many connections, of {address[0]} or in all")
                connection.close()
                continue
            self._handshakes += 1
            self._start(self._serve(connection, server))

    async def _serve(self, connection: socket.socket, server: web.Server) -> None:
        loop = asyncio.get_running_loop()
        try:
            await loop.connect_accepted_socket(
                server, connection, ssl=self._tls, ssl_handshake_timeout=HANDSHAKE_SECONDS
            )
        except (OSError, ssl.SSLError):
            connection.close()
        finally:
            self._handshakes -= 1

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _complain(self, why: str) -> None:
        if self._complaints.allows("all"):
            log.warning("connection_refused", error=why)

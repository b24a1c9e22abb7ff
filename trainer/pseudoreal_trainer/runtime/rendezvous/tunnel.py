"""Tunnels to the ranks' store. torch has no authentication for the store, so each tunnel starts with a handshake.

The store listens only on the loopback interface of worker 0. Each other worker has a port on its own loopback
interface. A connection to that port is forwarded to worker 0, after a handshake, and from there to the store.
"""

import asyncio
import socket
from collections.abc import Callable
from contextlib import closing
from typing import Any

import structlog

from pseudoreal_trainer.runtime.rendezvous.handshake import (
    HANDSHAKE_SECONDS,
    STORE,
    Connection,
    PeerRejected,
    greet_worker_0,
)

LOOPBACK = "127.0.0.1"
BACKLOG = 4096
_EARLY_BYTES = 2**20
"""Maximum number of bytes kept until a tunnel starts. A client of the store sends far fewer before it waits for an
answer."""
_PAUSE_SECONDS = 0.1
"""Seconds to pause after a connection could not be accepted."""
Address = tuple[socket.AddressFamily, Any]
"""Family of a socket, and an address in the form of `getpeername`."""

log = structlog.get_logger()


class _RelayEnd(asyncio.Protocol):
    """One of the two connections of a tunnel. Bytes received from this connection are written to the other.

    Bytes are kept until `begin`. `pause_reading` alone does not suffice: before Python 3.11.4, asyncio starts to read
    after `connection_made`, even if `connection_made` has paused reading.
    """

    other: "_RelayEnd"

    def __init__(self, moved: Callable[[], None]) -> None:
        self.transport: asyncio.Transport | None = None
        self._has_begun = self._has_ended = False
        self._moved, self._early = moved, bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport), "connect_accepted_socket makes a two-way transport"
        self.transport = transport
        transport.pause_reading()

    def data_received(self, data: bytes) -> None:
        self._moved()
        if self._has_begun:
            self.other._open.write(data)
        elif len(self._early) + len(data) <= _EARLY_BYTES:
            self._early += data
        else:
            self._open.abort()

    def begin(self) -> None:
        """Write the kept bytes to the other end, and from now on all received bytes. Both ends must be connected."""
        self._has_begun = True
        if self._early:
            self.other._open.write(bytes(self._early))
            self._early.clear()
        if self._has_ended:
            self.other._open.close()
        elif not self._open.is_closing():
            self._open.resume_reading()

    def pause_writing(self) -> None:
        self.other._open.pause_reading()

    def resume_writing(self) -> None:
        if not self.other._open.is_closing():
            self.other._open.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:  # noqa: ARG002
        self._has_ended = True
        if self._has_begun:
            self.other._open.close()

    @property
    def _open(self) -> asyncio.Transport:
        assert self.transport is not None, "relay() has connected both ends"
        return self.transport


async def relay(one: Connection, another: Connection, moved: Callable[[], None] = lambda: None) -> None:
    """Start relaying bytes between two connections, and return. The relay owns both sockets, and ends when either peer
    closes its connection. `moved`: called for each piece of bytes received."""
    loop, first, second = asyncio.get_running_loop(), _RelayEnd(moved), _RelayEnd(moved)
    first.other, second.other = second, first
    await loop.connect_accepted_socket(lambda: first, one.give_up())
    await loop.connect_accepted_socket(lambda: second, another.give_up())
    first.begin()
    second.begin()


async def accept(listener: socket.socket) -> tuple[socket.socket, str]:
    """Return the next connection and its source address."""
    while True:
        try:
            connected, address = await asyncio.get_running_loop().sock_accept(listener)
        except OSError as error:  # no descriptors are left, or the peer is gone already
            log.warning("connection_not_taken", error=str(error))
            await asyncio.sleep(_PAUSE_SECONDS)
        else:
            return connected, str(address[0]).removeprefix("::ffff:")


async def connect(address: Address) -> Connection:
    """Connect to an address. Raises OSError."""
    family, place = address
    connection = Connection(socket.socket(family))
    try:
        await asyncio.get_running_loop().sock_connect(connection.socket, place)
    except BaseException:
        connection.close()
        raise
    return connection


async def forward_to_store(listener: socket.socket, worker_0: Address, key: bytes) -> None:
    """Forward every connection of the listener to the store at worker 0, until cancelled. Close a connection that
    cannot be forwarded: torch's client of the store connects again."""
    tasks = set[asyncio.Task[None]]()
    while True:
        connected, _ = await accept(listener)
        task = asyncio.create_task(_forward(connected, worker_0, key))
        tasks.add(task)
        task.add_done_callback(tasks.discard)


async def _forward(connected: socket.socket, worker_0: Address, key: bytes) -> None:
    near = Connection(connected)
    try:
        async with asyncio.timeout(HANDSHAKE_SECONDS):
            far = await connect(worker_0)
            with closing(far):
                await greet_worker_0(far, key, STORE)
                await relay(near, far)
    except (OSError, PeerRejected) as error:  # TimeoutError is an OSError
        log.warning("store_not_reached", worker_0=worker_0[1][0], error=str(error) or type(error).__name__)
    finally:
        near.close()

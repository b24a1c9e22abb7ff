"""Handshake in which a worker and worker 0 prove to each other that both hold the key of their rendezvous, before
either reads anything else. Runs in an asyncio loop.

    worker                                                worker 0
    greeting: 8 bytes that never change, nonce a  ----->
                                                  <-----  nonce b, HMAC(key, "worker 0", greeting, b)
    purpose, HMAC(key, "worker", greeting, b, purpose) ->

All three messages have fixed sizes, and a peer without the key gets no further. Both nonces are fresh, so no proof can
be used twice. The two roles sign different texts, so neither can be made to sign for the other. Later texts
(`SignedTexts`) carry an HMAC of their own. The traffic of a tunnel carries no HMAC: like the ranks' own connections, a
tunnel is open to anyone who can read or change packets on the network.
"""

import asyncio
import hmac
import secrets
import socket
from contextlib import suppress
from dataclasses import dataclass, field

GREETING = b"PRmeet\0\1"
_NONCE_BYTES = PROOF_BYTES = 32
TEXT_BYTES = 4096
"""Maximum size of a signed text."""
MEET, STORE = b"M", b"S"
"""Purposes of a connection: to get a number, or to reach the store of the ranks."""
HANDSHAKE_SECONDS = 10.0
"""Time limit of a handshake."""
_KEEPIDLE = "TCP_KEEPIDLE" if hasattr(socket, "TCP_KEEPIDLE") else "TCP_KEEPALIVE"
"""Name of the option for the seconds of silence before the first probe: Linux's, or macOS's."""
_KEEPALIVE = {getattr(socket, _KEEPIDLE): 10, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 4}
"""Options of TCP keepalive: after 10 + 4 * 5 s of silence, the peer's machine counts as off."""


class PeerRejected(Exception):
    """Raised for a peer that does not hold the key; the text says what the peer did."""


class PeerLeft(PeerRejected):
    """Raised if the peer closes the connection before the first byte of a read."""

    def __init__(self) -> None:
        super().__init__("closed the connection")


class Connection:
    """A connected socket, read without a buffer: bytes after the handshake stay in the socket, for the tunnel."""

    def __init__(self, connected: socket.socket) -> None:
        self.socket, self._is_given = connected, False
        connected.setblocking(False)
        with suppress(OSError):  # the peer may be gone already; the first read then fails
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in _KEEPALIVE.items():
                connected.setsockopt(socket.IPPROTO_TCP, option, value)

    async def read(self, size: int) -> bytes:
        """Return the next `size` bytes. Raises OSError and PeerRejected."""
        loop, found = asyncio.get_running_loop(), b""
        while len(found) < size:
            part = await loop.sock_recv(self.socket, size - len(found))
            if not part:
                raise PeerRejected(f"closed the connection after {len(found)} of {size} bytes") if found else PeerLeft()
            found += part
        return found

    async def write(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self.socket, data)

    def give_up(self) -> socket.socket:
        """Return the socket. The caller owns the socket from now on, and closes it."""
        self._is_given = True
        return self.socket

    def close(self) -> None:
        if not self._is_given:
            self.socket.close()


@dataclass
class SignedTexts:
    """Signs and checks the texts of one connection. `mine`, `theirs`: names of the two sides, part of each signature.
    The signature also contains the number of the text in its direction, so no text can be repeated or left out."""

    key: bytes
    connection: Connection
    mine: bytes
    theirs: bytes
    _sent: int = field(default=0, init=False)
    _read: int = field(default=0, init=False)

    async def send(self, text: bytes) -> None:
        assert len(text) <= TEXT_BYTES, "descriptions of workers and answers fit into TEXT_BYTES"
        size = len(text).to_bytes(2, "big")
        await self.connection.write(size + self._proof(self.mine, self._sent, text) + text)
        self._sent += 1

    async def receive(self) -> bytes:
        """Return the next text. Raises OSError and PeerRejected."""
        head = await self.connection.read(2 + PROOF_BYTES)
        size = int.from_bytes(head[:2], "big")
        if size > TEXT_BYTES:
            raise PeerRejected(f"sent a text of {size} bytes")
        text = await self.connection.read(size) if size else b""
        if not hmac.compare_digest(head[2:], self._proof(self.theirs, self._read, text)):
            raise PeerRejected("sent a text without a proof")
        self._read += 1
        return text

    def _proof(self, side: bytes, count: int, text: bytes) -> bytes:
        return hmac.digest(self.key, side + count.to_bytes(8, "big") + text, "sha256")


async def answer_worker(connection: Connection, key: bytes) -> tuple[bytes, SignedTexts]:
    """Run worker 0's side. Return the purpose of the connection, and the signed texts that follow. Raises OSError and
    PeerRejected."""
    if await connection.read(len(GREETING)) != GREETING:
        raise PeerRejected("sent something else than a greeting")
    greeting = GREETING + await connection.read(_NONCE_BYTES)
    nonce = secrets.token_bytes(_NONCE_BYTES)
    await connection.write(nonce + _sign(key, b"worker 0", greeting, nonce))
    answer = await _proof_of_peer(connection)
    purpose, proof = answer[:1], answer[1:]
    if not hmac.compare_digest(proof, _sign(key, b"worker", greeting, nonce, purpose)):
        raise PeerRejected("does not know the secret of this meeting")
    return purpose, SignedTexts(_sign(key, b"texts", greeting, nonce, purpose), connection, b"0", b"w")


async def greet_worker_0(connection: Connection, key: bytes, purpose: bytes) -> SignedTexts:
    """Run another worker's side. Return the signed texts that follow. Raises OSError and PeerRejected."""
    greeting = GREETING + secrets.token_bytes(_NONCE_BYTES)
    await connection.write(greeting)
    answer = await connection.read(_NONCE_BYTES + PROOF_BYTES)
    nonce, proof = answer[:_NONCE_BYTES], answer[_NONCE_BYTES:]
    if not hmac.compare_digest(proof, _sign(key, b"worker 0", greeting, nonce)):
        raise PeerRejected("does not know the secret of this meeting")
    await connection.write(purpose + _sign(key, b"worker", greeting, nonce, purpose))
    return SignedTexts(_sign(key, b"texts", greeting, nonce, purpose), connection, b"w", b"0")


async def _proof_of_peer(connection: Connection) -> bytes:
    try:
        return await connection.read(1 + PROOF_BYTES)
    except PeerLeft:
        raise PeerRejected("left without a proof that it knows the secret of this meeting") from None


def _sign(key: bytes, *parts: bytes) -> bytes:
    """Return the HMAC of the parts. All parts but the first have fixed sizes, so no two lists of parts give the same
    text."""
    return hmac.digest(key, b"\0".join(parts), "sha256")

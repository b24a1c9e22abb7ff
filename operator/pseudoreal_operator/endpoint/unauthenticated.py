"""Unauthenticated connections, before their first valid token: limits on their number, and the order of their
handshakes. Pure, except for the clock.

Many pods may share an address: pods in the network of their node, or behind a network plugin that translates addresses.
So authenticated connections do not count here, and a valid token gives the rate limits their tokens back. At a limit,
the oldest connection of the address with the most connections is closed. An honest client authenticates in a fraction
of a second, so clients that only hold connections lose them first.
"""

import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from pseudoreal_operator.endpoint.limits import Clock, Limiter, sources_of

MOST = 2000
"""Maximum number of unauthenticated connections at a time."""
MOST_OF_ADDRESS, MOST_OF_NETWORK = 64, 512
"""Maximum number of unauthenticated connections at a time of one address, and of one IPv6 network."""
HANDSHAKES_OF_ADDRESS, HANDSHAKES_OF_NETWORK = 5, 40
"""Maximum number of handshakes at a time of one address, and of one IPv6 network."""
PER_SECOND, AT_ONCE = 10, 200
"""Limits on new connections of one address that bring no valid token: connections per second, and burst."""
NETWORK_FACTOR = 10
"""Limits on new connections of an IPv6 network, as a multiple of the limits of an address. All pods of a cluster may be
in one network."""


@dataclass(eq=False)
class UnauthenticatedConnection:
    """A connection without a valid token. `close` ends it in any state."""

    address: str
    close: Callable[[], object] = lambda: None
    sources: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.sources = sources_of(self.address)

    @property
    def source(self) -> str:
        return self.sources[0]


class UnauthenticatedConnections:
    """Unauthenticated connections by source, within the limits above."""

    def __init__(self, most: int = MOST, clock: Clock = time.monotonic) -> None:
        self._most = most
        self._rates = (
            Limiter(PER_SECOND, AT_ONCE, clock),
            Limiter(PER_SECOND * NETWORK_FACTOR, AT_ONCE * NETWORK_FACTOR, clock),
        )
        self._all: OrderedDict[UnauthenticatedConnection, None] = OrderedDict()
        """All connections, the oldest first."""
        self._by_source: dict[str, OrderedDict[UnauthenticatedConnection, None]] = {}
        """Source -> its connections, the oldest first."""
        self._sizes = _AddressesBySize()
        self._waiting: OrderedDict[str, OrderedDict[UnauthenticatedConnection, None]] = OrderedDict()
        """Address -> its connections that wait for a handshake; the address with the next turn comes first."""
        self._handshakes: Counter[str] = Counter()
        """Source -> number of its running handshakes."""

    def __len__(self) -> int:
        return len(self._all)

    def admit(self, connection: UnauthenticatedConnection) -> bool:
        """Add a new connection, and close old connections beyond the limits. Return False if the rate limit rejects the
        new connection."""
        if not self._is_within_rate(connection):
            return False
        self._all[connection] = None
        for source in connection.sources:
            self._by_source.setdefault(source, OrderedDict())[connection] = None
        self._sizes.increase(connection.source)
        self._make_room(connection)
        return True

    def remove(self, connection: UnauthenticatedConnection, *, authenticated: bool = False) -> None:
        """Remove a connection: it is over or, if `authenticated`, has brought a valid token. May be called twice."""
        if connection not in self._all:
            return
        del self._all[connection]
        self._sizes.decrease(connection.source)
        for source in connection.sources:
            _discard(self._by_source, source, connection)
        _discard(self._waiting, connection.source, connection)
        if authenticated:
            for source, rate in zip(connection.sources, self._rates, strict=False):
                rate.give_back(source)

    def request_handshake(self, connection: UnauthenticatedConnection) -> None:
        """Queue a connection for its handshake; do nothing if the connection was removed."""
        if connection in self._all:
            self._waiting.setdefault(connection.source, OrderedDict())[connection] = None

    def start_next_handshake(self) -> UnauthenticatedConnection | None:
        """Start the next handshake: return its connection; None if no handshake may start. Addresses take turns. The
        handshake lasts until `end_handshake` is called."""
        for source, connections in self._waiting.items():
            connection = next(iter(connections))
            if self._may_start_handshake(connection):
                self._waiting.move_to_end(source)
                _discard(self._waiting, source, connection)
                self._handshakes.update(connection.sources)
                return connection
        return None

    def end_handshake(self, connection: UnauthenticatedConnection) -> None:
        """End a handshake, whether it succeeded or failed."""
        self._handshakes.subtract(connection.sources)
        for source in connection.sources:
            if self._handshakes[source] <= 0:
                del self._handshakes[source]

    def _may_start_handshake(self, connection: UnauthenticatedConnection) -> bool:
        most = (HANDSHAKES_OF_ADDRESS, HANDSHAKES_OF_NETWORK)
        return all(self._handshakes[source] < bound for source, bound in zip(connection.sources, most, strict=False))

    def _is_within_rate(self, connection: UnauthenticatedConnection) -> bool:
        return all(rate.allows(source) for source, rate in zip(connection.sources, self._rates, strict=False))

    def _make_room(self, newcomer: UnauthenticatedConnection) -> None:
        address, *network = (self._by_source[source] for source in newcomer.sources)
        if len(address) > MOST_OF_ADDRESS:
            self._close(newcomer.source)
        elif network and len(network[0]) > MOST_OF_NETWORK:
            self._close(max(network[0], key=lambda one: len(self._by_source[one.source])).source)
        if len(self._all) > self._most:
            self._close(self._sizes.largest())

    def _close(self, address: str) -> None:
        """Close the oldest connection of an address."""
        oldest = next(iter(self._by_source[address]))
        self.remove(oldest)
        oldest.close()


class _AddressesBySize:
    """Addresses by their number of connections, to find the address with the most connections."""

    def __init__(self) -> None:
        self._sizes: dict[str, int] = {}
        self._addresses: dict[int, OrderedDict[str, None]] = {}
        """Number of connections -> the addresses with this number, in the order in which they reached it."""
        self._most = 0

    def largest(self) -> str:
        return next(iter(self._addresses[self._most]))

    def increase(self, address: str) -> None:
        size = self._change(address, 1)
        self._most = max(self._most, size)

    def decrease(self, address: str) -> None:
        size = self._change(address, -1)
        # Sizes change by one, so if no address has the largest size any more, the new largest is one smaller.
        if self._most not in self._addresses:
            self._most = size

    def _change(self, address: str, by: int) -> int:
        before = self._sizes.pop(address, 0)
        if before:
            del self._addresses[before][address]
            if not self._addresses[before]:
                del self._addresses[before]
        if size := before + by:
            self._sizes[address] = size
            self._addresses.setdefault(size, OrderedDict())[address] = None
        return size


def _discard(
    by_source: dict[str, OrderedDict[UnauthenticatedConnection, None]],
    source: str,
    connection: UnauthenticatedConnection,
) -> None:
    """Remove a connection from the entry of a source, and the entry with its last connection."""
    if (connections := by_source.get(source)) is not None:
        connections.pop(connection, None)
        if not connections:
            del by_source[source]

"""Connections that have not brought a valid token yet: how many are kept, and which one has the next handshake. Pure,
except for its clock.

Pods with valid tokens do not count here, however many share an address (pods in the network of their node, a network
plugin that translates addresses): the tokens that they took from their address's rate limit are given back. So the
limits of an address bind only connections that have proved nothing yet. At a limit, the oldest connection of the
address with the most connections is closed: an honest client needs a fraction of a second, so clients that only hold
connections lose them first.
"""

import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from pseudoreal_operator.endpoint.limits import Clock, Limiter, sources_of

MOST = 2000
"""Maximum number of strangers at a time."""
MOST_OF_ADDRESS, MOST_OF_NETWORK = 64, 512
"""Maximum number of strangers at a time of one address, and of one IPv6 network."""
HANDSHAKES_OF_ADDRESS, HANDSHAKES_OF_NETWORK = 5, 40
"""Maximum number of handshakes at a time, likewise."""
PER_SECOND, AT_ONCE = 10, 200
"""Limits on new connections of one address that bring no valid token."""
NETWORK_FACTOR = 10
"""How many times as many connections an IPv6 network may open as an address: clusters have all of their pods in one."""


@dataclass(eq=False)
class Stranger:
    """A connection without a valid token. `close` ends it in any state."""

    address: str
    close: Callable[[], object] = lambda: None
    sources: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.sources = sources_of(self.address)

    @property
    def source(self) -> str:
        return self.sources[0]


class Strangers:
    """Strangers by source, within the limits above."""

    def __init__(self, most: int = MOST, clock: Clock = time.monotonic) -> None:
        self._most = most
        self._rates = (
            Limiter(PER_SECOND, AT_ONCE, clock),
            Limiter(PER_SECOND * NETWORK_FACTOR, AT_ONCE * NETWORK_FACTOR, clock),
        )
        self._held: OrderedDict[Stranger, None] = OrderedDict()
        """All strangers, the oldest first."""
        self._of: dict[str, OrderedDict[Stranger, None]] = {}
        """Source -> its strangers, the oldest first."""
        self._sizes = _Sizes()
        self._waiting: OrderedDict[str, OrderedDict[Stranger, None]] = OrderedDict()
        """Address -> its strangers that wait for a handshake; the address with the next turn comes first."""
        self._shaking: Counter[str] = Counter()
        """Source -> number of its running handshakes."""

    def __len__(self) -> int:
        return len(self._held)

    def enter(self, stranger: Stranger) -> bool:
        """Add a new connection, for which others may be closed; return whether it may stay."""
        if not self._takes_of_rate(stranger):
            return False
        self._held[stranger] = None
        for source in stranger.sources:
            self._of.setdefault(source, OrderedDict())[stranger] = None
        self._sizes.grew(stranger.source)
        self._make_room(stranger)
        return True

    def leave(self, stranger: Stranger, *, known: bool = False) -> None:
        """Remove a connection: it is over or, if `known`, has brought a valid token. May be called twice."""
        if stranger not in self._held:
            return
        del self._held[stranger]
        self._sizes.shrank(stranger.source)
        for source in stranger.sources:
            _discard(self._of, source, stranger)
        _discard(self._waiting, stranger.source, stranger)
        if known:
            for source, rate in zip(stranger.sources, self._rates, strict=False):
                rate.give_back(source)

    def ask(self, stranger: Stranger) -> None:
        """Request a handshake."""
        if stranger in self._held:
            self._waiting.setdefault(stranger.source, OrderedDict())[stranger] = None

    def next(self) -> Stranger | None:
        """Return the stranger whose handshake is to start, one address after the other; None if none may start. The
        handshake lasts until `shaken` is called."""
        for source, those in self._waiting.items():
            stranger = next(iter(those))
            if self._may_shake(stranger):
                self._waiting.move_to_end(source)
                _discard(self._waiting, source, stranger)
                self._shaking.update(stranger.sources)
                return stranger
        return None

    def shaken(self, stranger: Stranger) -> None:
        """End a handshake, whether it succeeded or failed."""
        self._shaking.subtract(stranger.sources)
        for source in stranger.sources:
            if self._shaking[source] <= 0:
                del self._shaking[source]

    def _may_shake(self, stranger: Stranger) -> bool:
        most = (HANDSHAKES_OF_ADDRESS, HANDSHAKES_OF_NETWORK)
        return all(self._shaking[source] < bound for source, bound in zip(stranger.sources, most, strict=False))

    def _takes_of_rate(self, stranger: Stranger) -> bool:
        return all(rate.allows(source) for source, rate in zip(stranger.sources, self._rates, strict=False))

    def _make_room(self, newcomer: Stranger) -> None:
        address, *network = (self._of[source] for source in newcomer.sources)
        if len(address) > MOST_OF_ADDRESS:
            self._close(newcomer.source)
        elif network and len(network[0]) > MOST_OF_NETWORK:
            self._close(max(network[0], key=lambda one: len(self._of[one.source])).source)
        if len(self._held) > self._most:
            self._close(self._sizes.largest())

    def _close(self, address: str) -> None:
        """Close the oldest stranger of an address."""
        oldest = next(iter(self._of[address]))
        self.leave(oldest)
        oldest.close()


class _Sizes:
    """Addresses by their number of strangers."""

    def __init__(self) -> None:
        self._of: dict[str, int] = {}
        self._addresses: dict[int, OrderedDict[str, None]] = {}
        """Number of strangers -> the addresses with this number, in the order in which they reached it."""
        self._most = 0

    def largest(self) -> str:
        return next(iter(self._addresses[self._most]))

    def grew(self, address: str) -> None:
        size = self._moved(address, 1)
        self._most = max(self._most, size)

    def shrank(self, address: str) -> None:
        size = self._moved(address, -1)
        # Sizes change by one, so if no address has the largest size any more, the new largest is one smaller.
        if self._most not in self._addresses:
            self._most = size

    def _moved(self, address: str, by: int) -> int:
        before = self._of.pop(address, 0)
        if before:
            del self._addresses[before][address]
            if not self._addresses[before]:
                del self._addresses[before]
        if size := before + by:
            self._of[address] = size
            self._addresses.setdefault(size, OrderedDict())[address] = None
        return size


def _discard(those: dict[str, OrderedDict[Stranger, None]], source: str, stranger: Stranger) -> None:
    """Remove a stranger from the entry of a source, and the entry with its last stranger."""
    if (held := those.get(source)) is not None:
        held.pop(stranger, None)
        if not held:
            del those[source]

"""Connections that have not brought a good token yet: how many of whom are kept, and whose handshake is next. Pure, but
for its clock.

Pods whose token is good do not count here, however many share an address (pods in the network of their node, a network
plugin that translates addresses): what they took of their address's rate is given back. So the bounds of an address
bind those alone that have shown nothing yet. Where one is reached, the oldest connection of the address that has the
most makes room: an honest client needs a fraction of a second, so whoever only holds connections loses them first.
"""

import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from pseudoreal_operator.endpoint.address import sources_of
from pseudoreal_operator.endpoint.limits import Clock, Limiter

MOST = 2000
"""Most strangers at a time."""
MOST_OF_ADDRESS, MOST_OF_NETWORK = 64, 512
"""Most strangers at a time of one address, and of one IPv6 network."""
HANDSHAKES_OF_ADDRESS, HANDSHAKES_OF_NETWORK = 5, 40
"""Most handshakes at a time, likewise."""
PER_SECOND, AT_ONCE = 10, 200
"""Limits on new connections of one address that bring no good token."""
NETWORK_FACTOR = 10
"""How many times as many an IPv6 network may open: clusters have all of their pods in one."""


@dataclass(eq=False)
class Stranger:
    """A connection. `close` ends it, whatever it does."""

    address: str
    close: Callable[[], object] = lambda: None
    sources: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.sources = sources_of(self.address)

    @property
    def source(self) -> str:
        return self.sources[0]


class Strangers:
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
        """Address -> its strangers that wait for a handshake; the address whose turn it is comes first."""
        self._shaking: Counter[str] = Counter()
        """Source -> handshakes that go on."""

    def __len__(self) -> int:
        return len(self._held)

    def enter(self, stranger: Stranger) -> bool:
        """Takes a new connection, for which others may have to go: whether it may stay."""
        if not self._takes_of_rate(stranger):
            return False
        self._held[stranger] = None
        for source in stranger.sources:
            self._of.setdefault(source, OrderedDict())[stranger] = None
        self._sizes.grew(stranger.source)
        self._make_room(stranger)
        return True

    def leave(self, stranger: Stranger, *, known: bool = False) -> None:
        """Takes a connection off: it is over, or `known`, as it has brought a good token. May be called twice."""
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
        """Asks for a handshake."""
        if stranger in self._held:
            self._waiting.setdefault(stranger.source, OrderedDict())[stranger] = None

    def next(self) -> Stranger | None:
        """The stranger whose handshake is to begin, one address after the other; None where nobody may have one. The
        handshake goes on until `shaken`."""
        for source, those in self._waiting.items():
            stranger = next(iter(those))
            if self._may_shake(stranger):
                self._waiting.move_to_end(source)
                _discard(self._waiting, source, stranger)
                self._shaking.update(stranger.sources)
                return stranger
        return None

    def shaken(self, stranger: Stranger) -> None:
        """Ends a handshake, well or not."""
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
        """Closes the oldest stranger of an address."""
        oldest = next(iter(self._of[address]))
        self.leave(oldest)
        oldest.close()


class _Sizes:
    """Addresses by their number of strangers."""

    def __init__(self) -> None:
        self._of: dict[str, int] = {}
        self._addresses: dict[int, OrderedDict[str, None]] = {}
        """Number of strangers -> the addresses that have so many, that which has them longest first."""
        self._most = 0

    def largest(self) -> str:
        return next(iter(self._addresses[self._most]))

    def grew(self, address: str) -> None:
        size = self._moved(address, 1)
        self._most = max(self._most, size)

    def shrank(self, address: str) -> None:
        size = self._moved(address, -1)
        # Sizes change by one, so where the largest is gone, the next is one smaller.
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
    """Takes a stranger out of the entry of a source, and the entry with its last one."""
    if (held := those.get(source)) is not None:
        held.pop(stranger, None)
        if not held:
            del those[source]

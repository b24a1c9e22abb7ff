"""Token buckets that limit the rate of each caller, and the sources of a client: its address and its IPv6 network."""

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address

Clock = Callable[[], float]

_REMEMBERED = 20_000
"""Maximum number of remembered callers. The caller that was not seen for longest is forgotten first; its next bucket is
full."""


@dataclass
class _Bucket:
    tokens: float
    filled: float


class Limiter:
    """A token bucket per caller: `per_second` tokens are added each second, up to `burst`."""

    def __init__(self, per_second: float, burst: float, clock: Clock = time.monotonic) -> None:
        self._per_second, self._burst, self._clock = per_second, burst, clock
        self._buckets: OrderedDict[Hashable, _Bucket] = OrderedDict()

    def allows(self, caller: Hashable) -> bool:
        bucket = self._filled(caller)
        if bucket.tokens < 1:
            return False
        bucket.tokens -= 1
        return True

    def left(self, caller: Hashable) -> float:
        """Return how many tokens the caller has now."""
        return self._filled(caller).tokens

    def give_back(self, caller: Hashable) -> None:
        """Give the caller's last token back."""
        bucket = self._filled(caller)
        bucket.tokens = min(self._burst, bucket.tokens + 1)

    def _filled(self, caller: Hashable) -> _Bucket:
        now = self._clock()
        bucket = self._buckets.setdefault(caller, _Bucket(self._burst, now))
        self._buckets.move_to_end(caller)
        if len(self._buckets) > _REMEMBERED:
            self._buckets.popitem(last=False)
        bucket.tokens = min(self._burst, bucket.tokens + (now - bucket.filled) * self._per_second)
        bucket.filled = now
        return bucket


def sources_of(address: str) -> tuple[str, ...]:
    """Return the sources of a client: its address, and for IPv6 also the /64 network around it, because the owner of
    one address may have the whole network. A text that is not an address is a source by itself."""
    try:
        found = ip_address(address.partition("%")[0])
    except ValueError:
        return (address,)
    if not isinstance(found, IPv6Address):
        return (str(found),)
    # A dual-stack socket reports IPv4 clients as IPv4-mapped IPv6 addresses.
    if found.ipv4_mapped is not None:
        return (str(found.ipv4_mapped),)
    return (str(found), f"{IPv6Address(int(found) >> 64 << 64)}/64")

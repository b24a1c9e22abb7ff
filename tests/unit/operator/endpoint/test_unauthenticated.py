"""Number of unauthenticated connections per address, and the order of their handshakes."""

from functools import partial

import pytest
from pseudoreal_operator.endpoint import unauthenticated
from pseudoreal_operator.endpoint.limits import sources_of
from pseudoreal_operator.endpoint.unauthenticated import UnauthenticatedConnection, UnauthenticatedConnections

from tests.unit.operator.endpoint.support.clock import HandClock

ONE, OTHER = "10.0.0.1", "10.0.0.2"


class Clients:
    """Unauthenticated connections, and the connections that were closed."""

    def __init__(self, most: int = unauthenticated.MOST) -> None:
        self.clock = HandClock()
        self.connections = UnauthenticatedConnections(most, self.clock)
        self.closed: list[UnauthenticatedConnection] = []

    def connect(self, address: str, count: int = 1) -> list[UnauthenticatedConnection]:
        """Open `count` connections from an address; return the accepted ones."""
        found = []
        for _ in range(count):
            connection = UnauthenticatedConnection(address)
            connection.close = partial(self.closed.append, connection)
            if self.connections.admit(connection):
                found.append(connection)
        return found

    def start_handshakes(self) -> list[str]:
        """Return the addresses of the next handshakes, in order."""
        found = []
        while (connection := self.connections.start_next_handshake()) is not None:
            found.append(connection.address)
        return found


@pytest.fixture
def low_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, bound in (("MOST_OF_ADDRESS", 4), ("MOST_OF_NETWORK", 8), ("HANDSHAKES_OF_ADDRESS", 2)):
        monkeypatch.setattr(unauthenticated, name, bound)
    monkeypatch.setattr(unauthenticated, "HANDSHAKES_OF_NETWORK", 3)


@pytest.mark.parametrize(
    ("address", "sources"),
    [
        ("10.0.0.1", ("10.0.0.1",)),
        ("::ffff:10.0.0.1", ("10.0.0.1",)),
        ("2001:db8:1:2:3::4", ("2001:db8:1:2:3::4", "2001:db8:1:2::/64")),
        ("fe80::1%eth0", ("fe80::1", "fe80::/64")),
        ("", ("",)),
        ("a name", ("a name",)),
    ],
)
def test_sources_of_an_address_include_its_ipv6_network(address: str, sources: tuple[str, ...]) -> None:
    assert sources_of(address) == sources


@pytest.mark.usefixtures("low_limits")
def test_oldest_connection_of_an_address_makes_room_for_the_newest() -> None:
    clients = Clients()
    came = clients.connect(ONE, 6)
    assert clients.closed == came[:2]
    clients.connect(OTHER)
    assert clients.closed == came[:2], "others have room"


@pytest.mark.usefixtures("low_limits")
def test_address_with_the_most_connections_makes_room_at_the_total_limit() -> None:
    clients = Clients(most=6)
    few, many = clients.connect(ONE, 2), clients.connect(OTHER, 4)
    newest = clients.connect("10.0.0.3")
    assert clients.closed == many[:1]
    clients.connect("10.0.0.4")
    clients.connect("10.0.0.5")
    assert clients.closed == [*many[:2], few[0]], "of those with two each, whoever has had them for longest"
    assert newest[0] not in clients.closed


@pytest.mark.usefixtures("low_limits")
def test_connections_of_one_ipv6_network_are_bounded() -> None:
    clients = Clients()
    for host in range(20):
        clients.connect(f"2001:db8::{host}")
    assert len(clients.connections) == 8
    clients.connect(ONE)
    assert len(clients.connections) == 9


@pytest.mark.usefixtures("low_limits")
def test_address_with_the_most_connections_makes_room_in_its_network() -> None:
    """All pods of a cluster may be in one IPv6 network."""
    clients = Clients()
    honest = clients.connect("2001:db8::1")
    clients.connect("2001:db8::bad", 4)
    clients.connect("2001:db8::bad:2", 4)
    assert len(clients.closed) == 1
    assert honest[0] not in clients.closed


@pytest.mark.usefixtures("low_limits")
def test_handshakes_alternate_between_addresses_within_a_limit_per_address() -> None:
    clients = Clients()
    many, few = clients.connect(ONE, 4), clients.connect(OTHER)
    for connection in (*many, *few):
        clients.connections.request_handshake(connection)
    assert clients.start_handshakes() == [ONE, OTHER, ONE]
    clients.connections.end_handshake(many[0])
    assert clients.start_handshakes() == [ONE]


@pytest.mark.usefixtures("low_limits")
def test_handshakes_of_a_network_at_a_time_are_limited() -> None:
    clients = Clients()
    for host in range(5):
        clients.connections.request_handshake(*clients.connect(f"2001:db8::{host}"))
    assert len(clients.start_handshakes()) == 3


def test_closed_connection_gets_no_handshake() -> None:
    clients = Clients()
    gone, stays = clients.connect(ONE), clients.connect(ONE)
    clients.connections.request_handshake(*gone)
    clients.connections.request_handshake(*stays)
    clients.connections.remove(*gone)
    clients.connections.remove(*gone)
    clients.connections.request_handshake(*gone)
    assert (len(clients.start_handshakes()), len(clients.connections)) == (1, 1)


def test_new_connections_of_an_address_are_rate_limited() -> None:
    clients = Clients()
    assert len(clients.connect(ONE, 300)) == unauthenticated.AT_ONCE
    clients.clock.now += 1
    assert len(clients.connect(ONE, 300)) == unauthenticated.PER_SECOND
    assert len(clients.connect(OTHER, 300)) == unauthenticated.AT_ONCE


def test_authenticated_pods_behind_one_address_are_not_rate_limited() -> None:
    clients = Clients()
    for _ in range(5 * unauthenticated.AT_ONCE):
        (pod,) = clients.connect(ONE)
        clients.connections.remove(pod, authenticated=True)
    assert (clients.closed, len(clients.connections)) == ([], 0)


def test_closed_connections_leave_nothing_in_memory() -> None:
    clients = Clients()
    for host in range(100):
        for connection in clients.connect(f"2001:db8::{host}", 3):
            clients.connections.request_handshake(connection)
    for connection in list(clients.connections._all):
        clients.connections.remove(connection)
    found = clients.connections
    kept = (found._all, found._by_source, found._waiting, found._handshakes, found._sizes._addresses)
    assert not any(kept)

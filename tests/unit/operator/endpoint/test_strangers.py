"""Number of strangers kept per address, and the order of their handshakes."""

from functools import partial

import pytest
from pseudoreal_operator.endpoint import strangers
from pseudoreal_operator.endpoint.address import sources_of
from pseudoreal_operator.endpoint.strangers import Stranger, Strangers

from tests.unit.operator.endpoint.support.clock import HandClock

ONE, OTHER = "10.0.0.1", "10.0.0.2"


class Crowd:
    """Strangers, and the strangers that were closed."""

    def __init__(self, most: int = strangers.MOST) -> None:
        self.clock = HandClock()
        self.strangers = Strangers(most, self.clock)
        self.closed: list[Stranger] = []

    def come(self, address: str, count: int = 1) -> list[Stranger]:
        """Open `count` connections from an address; return the accepted ones."""
        found = []
        for _ in range(count):
            stranger = Stranger(address)
            stranger.close = partial(self.closed.append, stranger)
            if self.strangers.enter(stranger):
                found.append(stranger)
        return found

    def turns(self) -> list[str]:
        """Return the addresses of the next handshakes, in order."""
        found = []
        while (stranger := self.strangers.next()) is not None:
            found.append(stranger.address)
        return found


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, bound in (("MOST_OF_ADDRESS", 4), ("MOST_OF_NETWORK", 8), ("HANDSHAKES_OF_ADDRESS", 2)):
        monkeypatch.setattr(strangers, name, bound)
    monkeypatch.setattr(strangers, "HANDSHAKES_OF_NETWORK", 3)


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
def test_whom_an_address_stands_for(address: str, sources: tuple[str, ...]) -> None:
    assert sources_of(address) == sources


@pytest.mark.usefixtures("small")
def test_the_oldest_of_an_address_makes_room_for_its_newest() -> None:
    crowd = Crowd()
    came = crowd.come(ONE, 6)
    assert crowd.closed == came[:2]
    crowd.come(OTHER)
    assert crowd.closed == came[:2], "others have room"


@pytest.mark.usefixtures("small")
def test_where_all_together_are_too_many_the_address_with_the_most_makes_room() -> None:
    crowd = Crowd(most=6)
    few, many = crowd.come(ONE, 2), crowd.come(OTHER, 4)
    newest = crowd.come("10.0.0.3")
    assert crowd.closed == many[:1]
    crowd.come("10.0.0.4")
    crowd.come("10.0.0.5")
    assert crowd.closed == [*many[:2], few[0]], "of those with two each, whoever has had them for longest"
    assert newest[0] not in crowd.closed


@pytest.mark.usefixtures("small")
def test_one_network_has_no_room_for_more_however_many_addresses_it_has() -> None:
    crowd = Crowd()
    for host in range(20):
        crowd.come(f"2001:db8::{host}")
    assert len(crowd.strangers) == 8
    crowd.come(ONE)
    assert len(crowd.strangers) == 9


@pytest.mark.usefixtures("small")
def test_in_a_network_the_address_with_the_most_makes_room() -> None:
    """All pods of a cluster may be in one IPv6 network."""
    crowd = Crowd()
    honest = crowd.come("2001:db8::1")
    crowd.come("2001:db8::bad", 4)
    crowd.come("2001:db8::bad:2", 4)
    assert len(crowd.closed) == 1
    assert honest[0] not in crowd.closed


@pytest.mark.usefixtures("small")
def test_addresses_shake_hands_in_turn_and_each_has_few_at_a_time() -> None:
    crowd = Crowd()
    many, few = crowd.come(ONE, 4), crowd.come(OTHER)
    for stranger in (*many, *few):
        crowd.strangers.ask(stranger)
    assert crowd.turns() == [ONE, OTHER, ONE]
    crowd.strangers.shaken(many[0])
    assert crowd.turns() == [ONE]


@pytest.mark.usefixtures("small")
def test_a_network_has_few_handshakes_at_a_time() -> None:
    crowd = Crowd()
    for host in range(5):
        crowd.strangers.ask(*crowd.come(f"2001:db8::{host}"))
    assert len(crowd.turns()) == 3


def test_who_has_left_has_no_turn() -> None:
    crowd = Crowd()
    gone, stays = crowd.come(ONE), crowd.come(ONE)
    crowd.strangers.ask(*gone)
    crowd.strangers.ask(*stays)
    crowd.strangers.leave(*gone)
    crowd.strangers.leave(*gone)
    crowd.strangers.ask(*gone)
    assert (len(crowd.turns()), len(crowd.strangers)) == (1, 1)


def test_an_address_opens_so_many_at_once_and_then_so_many_a_second() -> None:
    crowd = Crowd()
    assert len(crowd.come(ONE, 300)) == strangers.AT_ONCE
    crowd.clock.now += 1
    assert len(crowd.come(ONE, 300)) == strangers.PER_SECOND
    assert len(crowd.come(OTHER, 300)) == strangers.AT_ONCE


def test_good_pods_behind_one_address_are_not_limited() -> None:
    crowd = Crowd()
    for _ in range(5 * strangers.AT_ONCE):
        (pod,) = crowd.come(ONE)
        crowd.strangers.leave(pod, known=True)
    assert (crowd.closed, len(crowd.strangers)) == ([], 0)


def test_nothing_is_kept_of_those_that_are_gone() -> None:
    crowd = Crowd()
    for host in range(100):
        for stranger in crowd.come(f"2001:db8::{host}", 3):
            crowd.strangers.ask(stranger)
    for stranger in list(crowd.strangers._held):
        crowd.strangers.leave(stranger)
    found = crowd.strangers
    kept = (found._held, found._of, found._waiting, found._shaking, found._sizes._addresses)
    assert not any(kept)

"""Token buckets, with a clock that a test sets."""

import pytest
from pseudoreal_operator.endpoint import limits
from pseudoreal_operator.endpoint.limits import Limiter

from tests.unit.operator.endpoint.support.clock import HandClock


def allowed(limiter: Limiter, caller: str, tries: int) -> int:
    return sum(limiter.allows(caller) for _ in range(tries))


def test_a_burst_then_a_rate() -> None:
    clock = HandClock()
    limiter = Limiter(per_second=2, burst=5, clock=clock)
    assert allowed(limiter, "a", 10) == 5
    clock.now += 1
    assert allowed(limiter, "a", 10) == 2


def test_asking_too_often_does_not_move_the_next_chance() -> None:
    clock = HandClock()
    limiter = Limiter(per_second=1, burst=1, clock=clock)
    assert limiter.allows("a")
    for _ in range(7):
        clock.now += 0.125
        assert not limiter.allows("a")
    clock.now += 0.125
    assert limiter.allows("a")


def test_a_long_silence_earns_no_more_than_a_burst() -> None:
    clock = HandClock()
    limiter = Limiter(per_second=1, burst=3, clock=clock)
    assert allowed(limiter, "a", 9) == 3
    clock.now += 3600
    assert allowed(limiter, "a", 9) == 3


def test_callers_do_not_share() -> None:
    limiter = Limiter(per_second=1, burst=2, clock=HandClock())
    assert [allowed(limiter, caller, 5) for caller in ("a", "b")] == [2, 2]


def test_what_is_given_back_can_be_used_again_and_only_that() -> None:
    limiter = Limiter(per_second=1, burst=2, clock=HandClock())
    assert limiter.allows("a")
    limiter.give_back("a")
    limiter.give_back("a")
    assert allowed(limiter, "a", 5) == 2


def test_who_was_not_seen_for_longest_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "_REMEMBERED", 2)
    limiter = Limiter(per_second=1, burst=1, clock=HandClock())
    for caller in ("a", "b"):
        assert limiter.allows(caller)
    assert not limiter.allows("a")
    assert limiter.allows("c")
    assert not limiter.allows("a"), "it was seen after b"
    assert limiter.allows("b"), "it was forgotten"

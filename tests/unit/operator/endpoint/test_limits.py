"""Token buckets, with a clock that a test sets."""

import pytest
from pseudoreal_operator.endpoint import limits
from pseudoreal_operator.endpoint.limits import Limiter

from tests.unit.operator.endpoint.support.clock import HandClock


def count_allowed(limiter: Limiter, caller: str, tries: int) -> int:
    return sum(limiter.allows(caller) for _ in range(tries))


def test_limiter_allows_a_burst_and_then_a_rate() -> None:
    clock = HandClock()
    limiter = Limiter(per_second=2, burst=5, clock=clock)
    assert count_allowed(limiter, "a", 10) == 5
    clock.now += 1
    assert count_allowed(limiter, "a", 10) == 2


def test_limiter_is_not_delayed_by_rejected_calls() -> None:
    clock = HandClock()
    limiter = Limiter(per_second=1, burst=1, clock=clock)
    assert limiter.allows("a")
    for _ in range(7):
        clock.now += 0.125
        assert not limiter.allows("a")
    clock.now += 0.125
    assert limiter.allows("a")


def test_limiter_refills_to_at_most_a_burst() -> None:
    clock = HandClock()
    limiter = Limiter(per_second=1, burst=3, clock=clock)
    assert count_allowed(limiter, "a", 9) == 3
    clock.now += 3600
    assert count_allowed(limiter, "a", 9) == 3


def test_limiter_buckets_are_per_caller() -> None:
    limiter = Limiter(per_second=1, burst=2, clock=HandClock())
    assert [count_allowed(limiter, caller, 5) for caller in ("a", "b")] == [2, 2]


def test_returned_token_can_be_used_again_once() -> None:
    limiter = Limiter(per_second=1, burst=2, clock=HandClock())
    assert limiter.allows("a")
    limiter.give_back("a")
    limiter.give_back("a")
    assert count_allowed(limiter, "a", 5) == 2


def test_limiter_forgets_the_least_recent_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "_REMEMBERED", 2)
    limiter = Limiter(per_second=1, burst=1, clock=HandClock())
    for caller in ("a", "b"):
        assert limiter.allows(caller)
    assert not limiter.allows("a")
    assert limiter.allows("c")
    assert not limiter.allows("a"), "it was seen after b"
    assert limiter.allows("b"), "it was forgotten"

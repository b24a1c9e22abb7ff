"""Prefetching. No test depends on time: the thread is observed where it waits for the test."""

import gc
import threading
import time
import weakref
from collections.abc import Callable
from itertools import count

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pseudoreal_trainer.data.prefetch import Prefetch

from tests.support.depth import DEPTH
from tests.support.patience import wait_for

SECONDS = 60


@settings(max_examples=DEPTH.of(30, 1000))
@given(st.integers(0, 10**12), st.integers(1, 64), st.integers(1, 4), st.integers(0, 12))
def test_results_come_in_the_order_of_cursors(first: int, stride: int, ahead: int, steps: int) -> None:
    with Prefetch(lambda cursor: cursor, first, stride, ahead) as prefetch:
        cursors = range(first, first + steps * stride, stride)
        assert [prefetch.take(cursor) for cursor in cursors] == [*cursors]


def test_no_more_is_made_than_is_asked_for() -> None:
    """At most two results wait, besides the one in use by training."""
    taken, most = 0, 0

    def make(cursor: int) -> int:
        nonlocal most
        most = max(most, cursor - taken)
        return cursor

    with Prefetch(make, 0, 1) as prefetch:
        for cursor in range(200):
            taken = cursor
            prefetch.take(cursor)
    assert most <= 2


def test_the_next_results_are_made_while_nobody_asks() -> None:
    made = threading.Semaphore(0)

    def make(cursor: int) -> int:
        made.release()
        return cursor

    with Prefetch(make, 0, 1, ahead=3):
        for _ in range(3):
            assert made.acquire(timeout=SECONDS)


def test_an_error_comes_at_its_cursor_and_stays() -> None:
    def make(cursor: int) -> int:
        if cursor == 4:
            raise OSError("the disk is gone")
        return cursor

    with Prefetch(make, 0, 2) as prefetch:
        assert [prefetch.take(0), prefetch.take(2)] == [0, 2]
        for _ in range(2):
            with pytest.raises(OSError, match="the disk is gone"):
                prefetch.take(4)


def _threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "prefetch"]


def test_prefetch_closes_while_its_thread_waits_for_room() -> None:
    reached = threading.Event()

    def make(cursor: int) -> int:
        if cursor == 1:
            reached.set()
        return cursor

    prefetch = Prefetch(make, 0, 1, ahead=2)
    assert reached.wait(SECONDS)
    prefetch.close()
    prefetch.close()
    assert _threads() == []


def test_prefetch_closes_while_its_thread_makes_a_result() -> None:
    """`close` waits for the thread: its resources are free afterwards."""
    begun, finished = threading.Event(), threading.Event()

    def make(cursor: int) -> int:
        begun.set()
        assert goes_on.wait(SECONDS)
        finished.set()
        return cursor

    goes_on = threading.Event()
    prefetch = Prefetch(make, 0, 1)
    assert begun.wait(SECONDS)
    closer = threading.Thread(target=prefetch.close)
    closer.start()
    goes_on.set()
    closer.join(SECONDS)
    assert not closer.is_alive()
    assert finished.is_set()
    assert _threads() == []


def test_an_error_of_the_caller_ends_the_thread() -> None:
    def interrupted() -> None:
        with Prefetch(lambda cursor: cursor, 0, 1):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    wait_for("the end of the thread", lambda: not _threads())


def test_an_error_of_the_caller_does_not_wait_for_what_hangs() -> None:
    begun, goes_on = threading.Event(), threading.Event()

    def make(cursor: int) -> int:
        begun.set()
        goes_on.wait(SECONDS)
        return cursor

    def fails() -> None:
        with Prefetch(make, 0, 1):
            assert begun.wait(SECONDS)
            raise OSError("the main thread has failed")

    with pytest.raises(OSError, match="the main thread has failed"):
        fails()
    assert _threads() == ["prefetch"], "it is still being made"
    goes_on.set()
    wait_for("the end of the thread", lambda: not _threads())


def test_prefetched_result_belongs_to_the_caller_alone() -> None:
    """Only the caller holds a reference, so a result is freed when the caller drops it; and two results share no
    memory."""
    make: Callable[[int], np.ndarray] = lambda cursor: np.full(10, cursor)  # noqa: E731
    with Prefetch(make, 0, 1) as prefetch:
        first, second = prefetch.take(0), prefetch.take(1)
        first[:] = -1
        assert second.tolist() == [1] * 10
        gone = weakref.ref(first)
        del first
        gc.collect()
        assert gone() is None


def test_prefetch_counts_the_time_that_the_caller_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock advances by one second at each call."""
    monkeypatch.setattr(time, "monotonic", count().__next__)
    with Prefetch(lambda cursor: cursor, 0, 1) as prefetch:
        assert prefetch.waited_seconds == 0
        prefetch.take(0)
        assert prefetch.waited_seconds == 1


def test_another_cursor_than_the_next_is_a_mistake() -> None:
    with Prefetch(lambda cursor: cursor, 0, 4) as prefetch, pytest.raises(AssertionError):
        prefetch.take(8)

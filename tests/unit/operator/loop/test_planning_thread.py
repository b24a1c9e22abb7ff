"""Computations beside the event loop: their results, their end, and the event loop in the meantime."""

import asyncio
import gc
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from pseudoreal_operator.loop.planning_thread import Overran, OverrunBackoff, PlanningThread

LIMIT = 0.1


def endless() -> None:
    while True:
        pass


def endless_with_garbage() -> None:
    while True:
        cycles: list[list[Any]] = [[] for _ in range(5000)]
        for one in cycles:
            one.append(one)


def endless_in_spite_of_errors() -> None:
    while True:
        try:
            endless()
        except Exception:
            continue


def endless_but_for_the_second_end() -> None:
    try:
        endless()
    except BaseException:
        endless()


async def wait_until_ended(threads: set[threading.Thread]) -> None:
    """Wait until these threads have ended."""
    async with asyncio.timeout(20):
        while any(thread.is_alive() for thread in threads):
            await asyncio.sleep(0.01)


@pytest.fixture(autouse=True)
def small_heap() -> Iterator[None]:
    """Keep the objects of the tests before, and their callbacks, out of the garbage collections of a test.

    A full collection of a large heap holds the interpreter lock for 0.1 s and more. The event loop gets the lock when
    the collection ends, which is in a callback such as Hypothesis's; Python ignores an exception raised there, so that
    a computation that mostly collects would never end.
    """
    callbacks = gc.callbacks[:]
    gc.callbacks.clear()
    gc.freeze()
    yield
    gc.unfreeze()
    gc.callbacks.extend(callbacks)


@pytest.fixture
def before() -> set[threading.Thread]:
    return {*threading.enumerate()}


@pytest.fixture
def thread(before: set[threading.Thread]) -> Iterator[PlanningThread]:
    assert before is not None
    yield (thread := PlanningThread(LIMIT))
    if thread._thread:
        thread._thread._tasks.put(None)


async def test_planning_thread_returns_and_raises_as_the_function_does(thread: PlanningThread) -> None:
    assert await thread.run(divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        await thread.run(divmod, 7, 0)


async def test_computations_share_a_thread(thread: PlanningThread) -> None:
    idents = [await thread.run(threading.get_ident) for _ in range(3)]
    assert len({*idents}) == 1
    assert threading.get_ident() not in idents


@pytest.mark.parametrize(
    "function", [endless, endless_with_garbage, endless_in_spite_of_errors, endless_but_for_the_second_end]
)
async def test_endless_computation_is_aborted_and_later_ones_run(
    thread: PlanningThread, before: set[threading.Thread], function: Any
) -> None:
    with pytest.raises(Overran, match=r"more than 0.1 s of processor time"):
        await thread.run(function)
    assert await thread.run(divmod, 7, 2) == (3, 1)
    await wait_until_ended({*threading.enumerate()} - before - {thread_of(thread)})


def thread_of(thread: PlanningThread) -> threading.Thread:
    assert thread._thread
    return thread._thread._thread


async def test_event_loop_runs_during_a_computation(thread: PlanningThread) -> None:
    """Each tick stands for a renewal of the Lease, or for a report."""
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.01)
            ticks += 1

    ticking = asyncio.create_task(tick())
    with pytest.raises(Overran):
        await thread.run(endless)
    ticking.cancel()
    assert ticks >= 3


async def test_time_limit_starts_when_the_computation_starts(thread: PlanningThread) -> None:
    found = await asyncio.gather(
        *(thread.run(function) for function in (endless, threading.get_ident, endless, threading.get_ident)),
        return_exceptions=True,
    )
    assert [type(each) for each in found] == [Overran, int, Overran, int]


async def test_time_limit_counts_cpu_time_only(thread: PlanningThread) -> None:
    await thread.run(time.sleep, 3 * LIMIT)


async def test_time_limit_counts_anew_after_a_full_garbage_collection(thread: PlanningThread) -> None:
    def collect() -> bool:
        begin = time.thread_time()
        while time.thread_time() - begin < 1.5 * LIMIT:
            gc.collect()
        return True

    assert await thread.run(collect)


async def test_cancelled_computation_is_aborted(thread: PlanningThread, before: set[threading.Thread]) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await thread.run(endless)
    await wait_until_ended({*threading.enumerate()} - before)


def test_overrun_backoff_doubles_until_the_spec_changes() -> None:
    now = 0.0
    alone = OverrunBackoff(lambda: now)
    assert alone.remaining("uid", 1) is None
    waits = []
    for _ in range(9):
        waits.append(alone.record("uid", 1))
        assert alone.remaining("uid", 1) == waits[-1]
        now += waits[-1]
        assert alone.remaining("uid", 1) is None
    assert waits == [60, 120, 240, 480, 960, 1920, 3600, 3600, 3600]
    alone.record("uid", 1)
    assert alone.remaining("uid", 2) is None
    assert alone.record("uid", 2) == 60
    alone.forget("uid")
    assert alone.remaining("uid", 2) is None


def test_overrun_backoff_remembers_a_bounded_number_of_jobs() -> None:
    alone = OverrunBackoff()
    for number in range(3000):
        alone.record(str(number), 1)
    assert alone.remaining("0", 1) is None
    assert alone.remaining("2999", 1) is not None
    assert len(alone._overruns) == 1000

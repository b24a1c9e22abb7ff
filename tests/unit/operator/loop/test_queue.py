"""The work queue in virtual time: no lost wake-up, one pass of a key at a time, a bound on workers, backoffs."""

import asyncio
from collections import Counter
from collections.abc import Coroutine
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pseudoreal_operator.cluster.retry import Backoff
from pseudoreal_operator.loop.queue import WorkQueue
from pseudoreal_operator.tasks import dead_tasks, live_tasks

from tests.support.depth import DEPTH
from tests.unit.operator.cluster.support import virtual_time

WORKERS = 3


def now() -> float:
    return asyncio.get_running_loop().time()


class Work:
    """Passes that take `seconds`, return the `waits` of their key one after another, and fail while `failures` are
    left."""

    def __init__(self, seconds: float = 0.0, waits: dict[str, list[float]] | None = None, failures: int = 0) -> None:
        self.seconds, self.waits, self.failures = seconds, waits or {}, failures
        self.begun: list[tuple[str, float]] = []
        self.at_once: Counter[str] = Counter()
        self.most_at_once = self.most_of_one = 0
        self.is_retry_after = False
        self.is_open = True
        self.queue: WorkQueue[str] = WorkQueue(
            self._pass, self._failed, group=lambda key: key.partition("/")[0], is_open=lambda: self.is_open
        )

    async def _pass(self, key: str) -> float | None:
        self.begun.append((key, now()))
        self.at_once[key] += 1
        self.most_of_one = max(self.most_of_one, self.at_once[key])
        self.most_at_once = max(self.most_at_once, self.at_once.total())
        try:
            await asyncio.sleep(self.seconds)
        finally:
            self.at_once[key] -= 1
        if self.failures:
            self.failures -= 1
            raise OSError("down")
        left = self.waits.get(key)
        return left.pop(0) if left else None

    def _failed(self, _key: str, _error: Exception, failures: int) -> Backoff | None:
        return Backoff(10.0 * failures, self.is_retry_after)

    def times(self, key: str = "a") -> list[float]:
        return [moment for begun, moment in self.begun if begun == key]

    def run(self, main: Coroutine[Any, Any, None], lasting: float = 1000.0) -> None:
        async def whole() -> None:
            async with self.queue.run_workers(WORKERS):
                await main
                await asyncio.sleep(lasting)

        virtual_time.run(whole())


def test_waiting_key_gets_one_pass() -> None:
    work = Work(seconds=1)

    async def main() -> None:
        for _ in range(5):
            work.queue.add("a")

    work.run(main())
    assert work.times() == [0]


def test_key_added_during_its_pass_gets_another_pass_afterwards() -> None:
    work = Work(seconds=10)

    async def main() -> None:
        work.queue.add("a")
        for _ in range(3):
            await asyncio.sleep(2)
            work.queue.add("a")

    work.run(main())
    assert work.times() == [0, 10]


def test_earliest_of_several_requested_times_counts_and_one_pass_serves_all() -> None:
    work = Work()

    async def main() -> None:
        for after in (30, 20, 25):
            work.queue.add("a", after)
        await asyncio.sleep(5)
        assert work.times() == []

    work.run(main())
    assert work.times() == [20]


def test_pass_says_when_the_next_one_is_due() -> None:
    work = Work(waits={"a": [0.0, 60.0]})

    async def main() -> None:
        work.queue.add("a")

    work.run(main())
    assert work.times() == [0, 0, 60]


def test_key_added_during_its_pass_overrides_the_delay_that_the_pass_returns() -> None:
    work = Work(seconds=1, waits={"a": [60.0]})

    async def main() -> None:
        work.queue.add("a")
        await asyncio.sleep(0.5)
        work.queue.add("a", 10)

    work.run(main())
    assert work.times() == [0, 10.5]


def test_backoff_of_a_failed_pass_grows_and_an_event_ends_it() -> None:
    work = Work(failures=3)

    async def main() -> None:
        work.queue.add("a")
        await asyncio.sleep(12)
        assert work.times() == [0, 10]
        work.queue.add("a")

    work.run(main())
    assert work.times() == [0, 10, 12, 42]


def test_no_event_shortens_a_retry_after() -> None:
    work = Work(seconds=1, failures=1)
    work.is_retry_after = True

    async def main() -> None:
        work.queue.add("a")
        for _ in range(5):
            await asyncio.sleep(0.7)
            work.queue.add("a")

    work.run(main())
    assert work.times() == [0, 11]
    assert work.queue._not_before == {}, "nothing is kept of it"


def test_changes_come_before_the_backlog_and_serve_its_keys() -> None:
    work = Work(seconds=1)
    backlog = [f"old-{number}" for number in range(3 * WORKERS)]

    async def main() -> None:
        for key in backlog:
            work.queue.add_backlog(key)
        await asyncio.sleep(0.5)
        for _ in range(2):
            for key in ("news", backlog[-1]):
                work.queue.add(key)

    work.run(main())
    first, then = backlog[:WORKERS], [backlog[WORKERS]]
    assert [key for key, _ in work.begun] == [*first, "news", backlog[-1], *then, *backlog[WORKERS + 1 : -1]]


def test_due_timer_does_not_wait_for_the_backlog() -> None:
    work = Work(seconds=10)

    async def main() -> None:
        for key in (*"bcdefgh", "a"):
            work.queue.add_backlog(key)
        work.queue.add("a", 5)

    work.run(main())
    assert work.times() == [10]


def test_backlog_respects_a_retry_after() -> None:
    work = Work(seconds=1, failures=1)
    work.is_retry_after = True

    async def main() -> None:
        work.queue.add("a")
        await asyncio.sleep(2)
        work.queue.add_backlog("a")

    work.run(main())
    assert work.times() == [0, 11]


def test_backlog_is_served_under_constant_changes() -> None:
    work = Work(seconds=1)

    async def main() -> None:
        for number in range(20):
            work.queue.add_backlog(f"old-{number}")
        for second in range(100):
            for number in range(2 * WORKERS):
                work.queue.add(f"news-{second}-{number}")
            await asyncio.sleep(1)

    work.run(main())
    ends = [work.times(f"old-{number}")[0] for number in range(20)]
    # One of four passes is over the backlog: so is one of a second's.
    assert max(ends) <= 40


def test_namespaces_take_turns_in_the_queue() -> None:
    work = Work(seconds=1)

    async def main() -> None:
        for number in range(200):
            work.queue.add(f"mallory/{number}")
        await asyncio.sleep(0.5)
        for number in range(3):
            work.queue.add(f"alice/{number}")

    work.run(main())
    assert max(work.times(f"alice/{number}")[0] for number in range(3)) <= 3


def test_one_namespace_leaves_workers_for_others() -> None:
    work, workers = Work(seconds=100), 16

    async def whole() -> None:
        async with work.queue.run_workers(workers):
            for number in range(50):
                work.queue.add(f"mallory/{number}")
            await asyncio.sleep(10)
            work.queue.add("alice/0")
            await asyncio.sleep(1)
            assert work.times("alice/0") == [10]
            assert work.at_once.total() == 13
            await asyncio.sleep(1000)
            assert work.at_once.total() == 0

    virtual_time.run(whole())
    assert len(work.begun) == 51, "and it has what is left"


def test_one_namespace_leaves_one_of_two_workers_for_others() -> None:
    work = Work(seconds=100)

    async def whole() -> None:
        async with work.queue.run_workers(2):
            for number in range(3):
                work.queue.add(f"mallory/{number}")
            await asyncio.sleep(10)
            work.queue.add("alice/0")
            await asyncio.sleep(1)
            assert work.times("alice/0") == [10]
            await asyncio.sleep(1000)

    virtual_time.run(whole())
    assert len(work.begun) == 4


class Odd(Exception):
    """An unexpected error."""


@pytest.mark.parametrize("error", [Odd, RecursionError, asyncio.CancelledError, MemoryError])
def test_workers_survive_errors_of_passes_and_of_failure_handlers(error: type[BaseException]) -> None:
    served: list[str] = []

    async def work(key: str) -> float | None:
        if key.startswith("bad"):
            raise error
        served.append(key)
        return None

    def failed(key: str, _error: Exception, _failures: int) -> Backoff | None:
        if key == "bad-0":
            return None
        raise Odd

    async def main() -> None:
        queue: WorkQueue[str] = WorkQueue(work, failed)
        async with queue.run_workers(2):
            for number in range(3):
                queue.add(f"bad-{number}")
            await asyncio.sleep(30)
            assert dead_tasks() == []
            assert len([name for name in live_tasks() if name.startswith("worker")]) == 2
            queue.add("good")
            await asyncio.sleep(1)

    virtual_time.run(main())
    assert served == ["good"]


def test_key_that_has_failed_for_good_waits_until_it_is_added() -> None:
    work = Work(failures=10)
    work.queue._failed = lambda _key, _error, failures: None if failures == 3 else Backoff(1.0)

    async def main() -> None:
        work.queue.add("a")
        await asyncio.sleep(100)
        assert work.times() == [0, 1, 2]
        work.queue.add("a")

    work.run(main())
    assert work.times() == [0, 1, 2, 100, 101, 102], "and its failures are counted anew"


def test_blocked_key_gets_no_pass_before_its_time() -> None:
    work = Work(seconds=1)

    async def main() -> None:
        work.queue.add("a")
        await asyncio.sleep(0.1)
        work.queue.add("a", 2)
        work.queue.block("a", 10)
        for _ in range(5):
            work.queue.add("a")
            work.queue.add_backlog("a")
            await asyncio.sleep(1)

    work.run(main())
    assert work.times() == [0, 10.1]


def test_closed_queue_starts_no_pass_and_loses_none() -> None:
    work = Work(seconds=1)

    async def main() -> None:
        work.is_open = False
        for number in range(10):
            work.queue.add(f"a/{number}")
        await asyncio.sleep(1800)
        assert work.begun == []
        work.is_open = True

    work.run(main())
    assert len(work.begun) == 10
    assert work.begun[-1][1] < 1810


def test_forgotten_key_gets_no_pass() -> None:
    work = Work(seconds=1)

    async def main() -> None:
        for key in ("b", "c", "d", "a"):
            work.queue.add(key)
        await asyncio.sleep(0.5)
        work.queue.forget("a")
        work.queue.add("e", 5)
        work.queue.forget("e")

    work.run(main())
    assert [key for key, _ in work.begun] == ["b", "c", "d"]


def test_shutdown_lets_a_running_pass_end_and_starts_none() -> None:
    work, done = Work(seconds=3), list[float]()

    async def main() -> None:
        for key in ("a", "b", "c", "d", "e"):
            work.queue.add(key)
        await asyncio.sleep(1)

    async def whole() -> None:
        async with work.queue.run_workers(WORKERS):
            await main()
        done.append(now())

    virtual_time.run(whole())
    assert done == [3]
    assert len(work.begun) == WORKERS


def test_shutdown_cancels_a_hanging_pass() -> None:
    work = Work(seconds=1e6)

    async def main() -> None:
        work.queue.add("a")

    work.run(main(), lasting=1)
    assert work.at_once.total() == 0


_ACTIONS = st.lists(
    st.tuples(
        st.sampled_from("abcdef"),
        st.sampled_from(["add", "later", "backlog", "forget", "sleep"]),
        st.integers(0, 20).map(lambda tenths: tenths / 10),
    ),
    max_size=40,
)


@settings(max_examples=DEPTH.of(150, 5000))
@given(_ACTIONS, st.sampled_from([0.0, 0.3, 1.0]), st.integers(0, 4))
def test_every_added_key_gets_a_whole_pass_afterwards(
    actions: list[tuple[str, str, float]], seconds: float, failures: int
) -> None:
    work, owed = Work(seconds=seconds, failures=failures), dict[str, float]()

    async def main() -> None:
        for key, action, amount in actions:
            if action == "sleep":
                await asyncio.sleep(amount)
            elif action == "forget":
                work.queue.forget(key)
                owed.pop(key, None)
            else:
                work.queue.add(key, amount if action == "later" else 0.0)
                owed[key] = max(owed.get(key, 0.0), now())

    work.run(main())
    assert work.most_of_one <= 1
    assert work.most_at_once <= WORKERS
    for key, moment in owed.items():
        assert work.times(key)[-1] >= moment, f"{key} was added at {moment}, and its last pass began before"
    assert not work.queue._pending, "nothing is left undone"

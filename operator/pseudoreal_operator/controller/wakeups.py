"""Lets watch events end the wait of a job's loop."""

import asyncio

Wish = tuple[int, str]
"""What a user can change of a job: its spec, by generation, and the annotation that ends a phase."""


class Wakeups:
    """By the uids of jobs. Events for jobs without a loop are dropped: a loop begins by reading everything."""

    def __init__(self) -> None:
        self._events: dict[str, asyncio.Event] = {}
        self._wishes: dict[str, Wish] = {}

    def add(self, uid: str) -> None:
        self._events[uid] = asyncio.Event()

    def remove(self, uid: str) -> None:
        self._events.pop(uid, None)
        self._wishes.pop(uid, None)

    def wake(self, uid: str) -> None:
        if uid in self._events:
            self._events[uid].set()

    def wake_on_change(self, uid: str, wish: Wish) -> None:
        """Only for a new wish of the user: most events of a job are the echo of our own status."""
        if uid in self._events and self._wishes.get(uid) != wish:
            self._wishes[uid] = wish
            self.wake(uid)

    async def wait(self, uid: str, seconds: float | None) -> None:
        """Until the job is woken or the time is over; None waits for ever. A wake-up during a pass is not lost."""
        try:
            await asyncio.wait_for(self._events[uid].wait(), seconds)
        except TimeoutError:
            return
        self._events[uid].clear()

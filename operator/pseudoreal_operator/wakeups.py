"""Lets watch events end the wait of a job's loop."""

import asyncio

Key = tuple[str, str]
"""Namespace and name of a PseudoRealJob."""
Wish = tuple[int, str]
"""What a user can change of a job: its spec, by generation, and the annotation that ends a phase."""


class Wakeups:
    """Events for jobs without a loop are dropped: a loop begins by reading everything."""

    def __init__(self) -> None:
        self._events: dict[Key, asyncio.Event] = {}
        self._wishes: dict[Key, Wish] = {}

    def add(self, key: Key) -> None:
        self._events[key] = asyncio.Event()

    def remove(self, key: Key) -> None:
        self._events.pop(key, None)
        self._wishes.pop(key, None)

    def wake(self, key: Key) -> None:
        if key in self._events:
            self._events[key].set()

    def wake_on_change(self, key: Key, wish: Wish) -> None:
        """Only for a new wish of the user: most events of a job are the echo of our own status."""
        if key in self._events and self._wishes.get(key) != wish:
            self._wishes[key] = wish
            self.wake(key)

    async def wait(self, key: Key, seconds: float | None) -> None:
        """Until the job is woken or the time is over; None waits for ever. A wake-up during a pass is not lost."""
        try:
            await asyncio.wait_for(self._events[key].wait(), seconds)
        except TimeoutError:
            return
        self._events[key].clear()

"""What is read for the pages that are open: one thread for each feed, whose reads may take long, or hang.

The event loop never waits for a read: it has the newest content, and knows since when the read that runs has been
running. Threads are daemons, so one that hangs does not keep the program from ending. A feed that nobody watches is
closed after a while; one whose read hangs keeps its thread, and counts, until the read returns.
"""

import asyncio
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import structlog
from pydantic import ValidationError

from pseudoreal_trainer.errors import TrainingError
from pseudoreal_trainer.ui.html import Content
from pseudoreal_trainer.ui.view import Feed

T = TypeVar("T")

MOST_CHANNELS = 24
"""Most feeds that are read at a time."""
IDLE_SECONDS = 30.0
"""Seconds after which a feed that nobody watches is closed."""
HANGING_SECONDS = 5.0
"""Seconds after which a page says that a read takes long."""

log = structlog.get_logger()


class TooManyChannels(Exception):
    """As many feeds are read as this program reads at a time."""


class Channel:
    """A feed, its newest content, and everybody who waits for another one. All but `_run` is for the event loop."""

    def __init__(self, feed: Feed[T], content_of: Callable[[T], Content]) -> None:
        self.content: Content | None = None
        """Newest content; None: the first read has not returned."""
        self.error = ""
        """Sentence on why the newest read failed; empty: it did not."""
        self.left_at: float | None = time.monotonic()
        """Time (time.monotonic) since which nobody watches; None: somebody does."""
        self._watchers = 0
        self._changed = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._closed = threading.Event()
        self._reading_since: float | None = None
        self._thread = threading.Thread(target=self._run, args=(feed, content_of), name="feed", daemon=True)
        self._feed: Feed[object] = feed
        self._thread.start()

    def _run(self, feed: Feed[T], content_of: Callable[[T], Content]) -> None:
        while not self._closed.is_set():
            self._reading_since = time.monotonic()
            content, error = None, ""
            try:
                found = feed.read()
                content = None if found is None else content_of(found)
            except Exception as failure:
                error = _sentence(failure)
            self._reading_since = None
            if self._closed.is_set():
                return
            try:
                self._loop.call_soon_threadsafe(self._take, content, error)
            except RuntimeError:  # the event loop has ended
                return
            feed.wait()

    def _take(self, content: Content | None, error: str) -> None:
        is_same = content is None or (self.content is not None and content.digest == self.content.digest)
        if is_same and error == self.error:
            return
        self.error = error
        if content is not None and not is_same:
            self.content = content
        self._changed.set()
        self._changed = asyncio.Event()

    @property
    def trouble(self) -> str:
        """Sentence on why the content may be old; empty: it is new."""
        since = self._reading_since
        if since is not None and time.monotonic() - since > HANGING_SECONDS:
            seconds = time.monotonic() - since
            return f"There has been no answer for {seconds:.0f} s; the page shows the state before."
        return self.error

    @property
    def is_hanging(self) -> bool:
        """Whether its thread is in a read that takes long."""
        since = self._reading_since
        return self._thread.is_alive() and since is not None and time.monotonic() - since > HANGING_SECONDS

    def next_change(self) -> asyncio.Event:
        """Return an event, which is set as soon as there is new content or another error."""
        return self._changed

    def enter(self) -> None:
        self._watchers, self.left_at = self._watchers + 1, None

    def leave(self) -> None:
        self._watchers -= 1
        if not self._watchers:
            self.left_at = time.monotonic()

    def close(self) -> None:
        self._closed.set()
        self._feed.close()


def _sentence(failure: Exception) -> str:
    if isinstance(failure, TrainingError | OSError) or hasattr(failure, "message"):
        return str(failure)
    # A defect of this program, or a file that nobody has thought of: the other pages go on.
    log.error("page_not_made", exc_info=failure)
    kind = "values that make no sense" if isinstance(failure, ValidationError) else type(failure).__name__
    return f"The page cannot be made ({kind}); the program's own output has more."


class Channels:
    """Channels by key."""

    def __init__(self, most: int = MOST_CHANNELS) -> None:
        self._most = most
        self._open: dict[str, Channel] = {}
        self._closed: list[Channel] = []
        """Channels that were closed while a read was hanging."""

    def find(self, key: str) -> Channel | None:
        self.close_idle()
        return self._open.get(key)

    def open(self, key: str, feed: Feed[T], content_of: Callable[[T], Content]) -> Channel:
        """Return a new channel of the key. Raises TooManyChannels."""
        if len(self._open) >= self._most:
            self._close_one()
        if len(self._open) + len(self._closed) >= self._most:
            raise TooManyChannels
        self._open[key] = Channel(feed, content_of)
        return self._open[key]

    def close_idle(self) -> None:
        now = time.monotonic()
        for key, channel in [*self._open.items()]:
            if channel.left_at is not None and now - channel.left_at > IDLE_SECONDS:
                self._close(key)
        self._closed = [channel for channel in self._closed if channel.is_hanging]

    def _close_one(self) -> None:
        """Close the channel that nobody has watched for the longest time, if there is one."""
        idle = {key: channel.left_at for key, channel in self._open.items() if channel.left_at is not None}
        if idle:
            self._close(min(idle, key=lambda key: idle[key]))

    def _close(self, key: str) -> None:
        channel = self._open.pop(key)
        channel.close()
        if channel.is_hanging:
            self._closed.append(channel)

    def close(self) -> None:
        for key in [*self._open]:
            self._close(key)

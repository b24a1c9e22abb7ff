"""Watches that never end: they list the children of all jobs once, and report each change as it happens."""

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import structlog
from kubernetes.aio.client import ApiException

from pseudoreal_operator.cluster.api import Api
from pseudoreal_operator.cluster.bounds import Unreadable
from pseudoreal_operator.cluster.retry import API_ERRORS, backoff_after
from pseudoreal_operator.metrics.registry import LAST_EVENT, WATCH_ERRORS

Json = dict[str, Any]


class Store(Protocol):
    """Memory of the objects of one watch."""

    def connected(self) -> None:
        """Note that the watch is connected."""

    def cut(self) -> None:
        """Note that the connection has ended: the store may now lack changes until the watch tells them."""

    def told(self, version: str) -> None:
        """Note that all changes up to this version have been told."""

    def missed(self, version: str) -> None:
        """Note that changes up to this version may have happened while the watch was cut."""

    def list_again(self) -> "Listing":
        """Begin a new list of the present objects. Until `Listing.finish`, nothing is known of them."""


class Listing(Protocol):
    """A list of the present objects."""

    def add(self, body: Json) -> None: ...

    def finish(self, version: str) -> None:
        """Note that the list is complete, as of this version."""


_GONE = 410
_PAUSE_SECONDS = 0.1
"""Seconds between the end of a watch without an error and the next watch."""
_MOST_PAUSE_SECONDS = 10.0
"""Maximum seconds between a failed connection and the next, so that a recovered API server is noticed soon. A
Retry-After of the API server may be longer."""

log = structlog.get_logger()


@dataclass(frozen=True)
class Watch:
    """Watch of the objects of one kind with a label. `namespace`: None for all namespaces."""

    api: Api
    kind: str
    namespace: str | None
    label: str
    store: Store
    on_change: Callable[[str, Json], None]
    """Called with the event type and the object of each change."""
    on_missed: Callable[[], None]
    """Called when changes may have been missed: at the start, and when the API server no longer has the changes after
    the last one reported."""

    async def run(self, started: asyncio.Event) -> NoReturn:
        """Watch until cancelled. Set `started` once no further change is missed."""
        version, failures = "", 0
        last_event = LAST_EVENT.labels(kind=self.kind, namespace=self.namespace or "")
        while True:
            try:
                if not version:
                    version = await self._list()
                    # Call it after the list: a pass that is requested now finds all changes up to this version.
                    self.on_missed()
                    started.set()
                    last_event.set_to_current_time()
                elif failures:
                    # The watch is connected before it has told the changes since its last version, and these may be
                    # hours old.
                    self.store.missed(await self.api.version(self.kind, self.namespace, self.label))
                changes = self.api.watch(self.kind, self.namespace, self.label, version, opened=self.store.connected)
                async for change, body in changes:
                    version, failures = body["metadata"]["resourceVersion"], 0
                    last_event.set_to_current_time()
                    if change != "BOOKMARK":
                        self.on_change(change, body)
                    self.store.told(version)
                pause = _PAUSE_SECONDS
            # Catch every error: without this watch all jobs stand still.
            except Exception as error:
                failures += 1
                # Start from a new version after a bug: from the old version, a change that cannot be processed would be
                # sent again.
                version = "" if _is_gone(error) or not isinstance(error, API_ERRORS) else version
                found = backoff_after(error, failures, random.random())
                pause = found.seconds if found.is_retry_after else min(found.seconds, _MOST_PAUSE_SECONDS)
                self._note(error, pause)
            finally:
                self.store.cut()
            await asyncio.sleep(pause)

    async def _list(self) -> str:
        """List all objects into the store; return the version of the list, from which a watch can start."""
        listing, versions = self.store.list_again(), list[str]()

        def skip(body: Json, _reason: Unreadable) -> None:
            if body["metadata"]:
                listing.add(body)

        async for body in self.api.each(self.kind, self.namespace, self.label, skipped=skip, listed=versions.append):
            listing.add(body)
        listing.finish(versions[-1])
        return versions[-1]

    def _note(self, error: Exception, pause: float) -> None:
        WATCH_ERRORS.labels(kind=self.kind).inc()
        facts = {"kind": self.kind, "namespace": self.namespace, "retry_after": round(pause, 1)}
        if isinstance(error, (*API_ERRORS, Unreadable)):
            log.info("watch_ended", error=f"{type(error).__name__}: {error}", **facts)
        else:
            log.error("watch_ended", exc_info=error, **facts)


def _is_gone(error: Exception) -> bool:
    return isinstance(error, ApiException) and error.status == _GONE

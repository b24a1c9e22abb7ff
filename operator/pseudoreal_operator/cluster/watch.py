"""Watches that never end: changes of the children of all jobs are reported as they happen; no object is stored."""

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import structlog
from kubernetes.aio.client import ApiException

from pseudoreal_operator.cluster.api import Api
from pseudoreal_operator.cluster.bounds import Unreadable
from pseudoreal_operator.cluster.retry import UNAVAILABLE, backoff_after
from pseudoreal_operator.metrics.registry import LAST_EVENT, WATCH_ERRORS

Json = dict[str, Any]

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
                    version = await self.api.version(self.kind, self.namespace, self.label)
                    # Call it after the version was read: a pass that is requested now reads all changes up to this
                    # version.
                    self.on_missed()
                    started.set()
                    last_event.set_to_current_time()
                async for change, body in self.api.watch(self.kind, self.namespace, self.label, version):
                    version, failures = body["metadata"]["resourceVersion"], 0
                    last_event.set_to_current_time()
                    if change != "BOOKMARK":
                        self.on_change(change, body)
                pause = _PAUSE_SECONDS
            # Catch every error: without this watch all jobs stand still.
            except Exception as error:
                failures += 1
                # Start from a new version after a bug: from the old version, a change that cannot be processed would be
                # sent again.
                version = "" if _is_gone(error) or not isinstance(error, UNAVAILABLE) else version
                found = backoff_after(error, failures, random.random())
                pause = found.seconds if found.is_retry_after else min(found.seconds, _MOST_PAUSE_SECONDS)
                self._note(error, pause)
            await asyncio.sleep(pause)

    def _note(self, error: Exception, pause: float) -> None:
        WATCH_ERRORS.labels(kind=self.kind).inc()
        facts = {"kind": self.kind, "namespace": self.namespace, "retry_after": round(pause, 1)}
        if isinstance(error, (*UNAVAILABLE, Unreadable)):
            log.info("watch_ended", error=f"{type(error).__name__}: {error}", **facts)
        else:
            log.error("watch_ended", exc_info=error, **facts)


def _is_gone(error: Exception) -> bool:
    return isinstance(error, ApiException) and error.status == _GONE

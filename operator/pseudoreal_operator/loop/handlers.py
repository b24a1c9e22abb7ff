"""kopf's side: the watch of the jobs, and the liveness probe."""

import asyncio
import time
from typing import Any

import kopf
from pseudoreal_api.base import GROUP, PLURAL, VERSION

from pseudoreal_operator.loop.counts import Counts
from pseudoreal_operator.loop.loop import WATCH_TASK, WATCHED_CHILDREN, Loop
from pseudoreal_operator.settings import Settings

_START_SECONDS = 10.0
"""Seconds until kopf has found the kind to watch."""
_KOPF_TASK = "watcher for "


def register(registry: kopf.OperatorRegistry, loop: Loop, counts: Counts, settings: Settings) -> None:
    begun = time.monotonic()

    # Handlers of events write nothing to a job: no finalizer, no annotation.
    @kopf.on.event(GROUP, VERSION, PLURAL, registry=registry)
    async def job_changed(type: str | None, event: Any, **_: Any) -> None:
        loop.job_changed(type, event["object"])

    @kopf.on.probe(registry=registry, id="watchers")
    async def watchers(**_: Any) -> int:
        starting = time.monotonic() - begun < _START_SECONDS
        # Those of jobs and of their children in each namespace, and the one that notices silence.
        kinds = (1 + len(WATCHED_CHILDREN)) * max(1, len(settings.namespaces))
        return live_watchers(0 if starting else kinds + 1)

    for name in vars(counts):
        kopf.on.probe(registry=registry, id=name)(_count(counts, name))


def _count(counts: Counts, name: str) -> Any:
    async def probe(**_: Any) -> int:
        return int(getattr(counts, name))

    return probe


def live_watchers(expected: int) -> int:
    """Number of watches that run. Raises PermanentError, which fails the probe, when they are fewer than expected. A
    kind that is not there when kopf starts is never watched, and nothing else tells. When a watch ends with an error
    kopf ends the operator, but not in all of its releases (seen with kopf 1.45.2)."""
    names = [task.get_name() for task in asyncio.all_tasks() if not task.done()]
    alive = sum(name.startswith((_KOPF_TASK, WATCH_TASK)) for name in names)
    if alive < expected:
        raise kopf.PermanentError(f"{alive} of {expected} watches run; a restart of the operator brings them back")
    return alive

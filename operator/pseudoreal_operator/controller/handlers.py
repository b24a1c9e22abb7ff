"""The kopf side: one loop for each job, woken by watch events, and the liveness probe."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import kopf
import structlog
from aiohttp import ClientError
from kubernetes.aio.client import ApiException
from pseudoreal_api.base import GROUP, PLURAL, VERSION
from pseudoreal_api.names import ANNOTATION_FINISH_PHASE, LABEL_JOB_UID

from pseudoreal_operator.cluster.api import Api, message_of
from pseudoreal_operator.controller.counts import Counts
from pseudoreal_operator.controller.reconcile import Gone, Identity, reconcile
from pseudoreal_operator.controller.wakeups import Wakeups
from pseudoreal_operator.observe.board import Board
from pseudoreal_operator.settings import Settings

_BACKOFFS = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0)
"""Seconds between passes that fail."""
_WATCHED_KINDS = 2
_START_SECONDS = 10.0
"""Until kopf has found the kinds to watch."""

log = structlog.get_logger()


def register(registry: kopf.OperatorRegistry, api: Api, board: Board, settings: Settings) -> None:
    wakeups, counts = Wakeups(), Counts()
    begun = time.monotonic()

    # kopf cancels the loop when the job is deleted or the operator ends; a pass may be cut off anywhere.
    @kopf.daemon(GROUP, VERSION, PLURAL, registry=registry, id="reconcile", cancellation_timeout=5.0)
    async def keep_reconciling(namespace: str | None, name: str | None, uid: str | None, **_: Any) -> None:
        assert namespace is not None, "jobs are namespaced"
        assert name is not None, "stored objects have a name"
        assert uid is not None, "and a uid"
        structlog.contextvars.bind_contextvars(job=f"{namespace}/{name}")
        wakeups.add(uid)
        try:
            who = Identity(namespace, name, uid)
            await _loop(lambda: reconcile(api, board, settings, counts, who), wakeups, uid)
        finally:
            wakeups.remove(uid)
            board.forget((namespace, uid))

    # Without its finalizer a job is gone at once, and kopf does not end its loop.
    @kopf.on.event(GROUP, VERSION, PLURAL, registry=registry)
    async def job_changed(type: str | None, uid: str | None, meta: kopf.Meta, **_: Any) -> None:
        if type == "DELETED":
            wakeups.wake(uid or "")
        wish = meta.annotations.get(ANNOTATION_FINISH_PHASE, "")
        wakeups.wake_on_change(uid or "", (meta.get("generation", 0), wish))

    @kopf.on.event("batch", "v1", "jobs", registry=registry, labels={LABEL_JOB_UID: kopf.PRESENT})
    async def child_changed(labels: kopf.Labels, **_: Any) -> None:
        wakeups.wake(labels[LABEL_JOB_UID])

    @kopf.on.probe(registry=registry, id="watchers")
    async def watchers(**_: Any) -> int:
        starting = time.monotonic() - begun < _START_SECONDS
        return live_watchers(0 if starting else _WATCHED_KINDS * max(1, len(settings.namespaces)))

    @kopf.on.probe(registry=registry, id="refused_statuses")
    async def refused_statuses(**_: Any) -> int:
        return counts.refused_statuses


def live_watchers(expected: int) -> int:
    """How many watches run. Raises PermanentError, which fails the probe, when they are fewer than expected.

    A kind that is not there when kopf starts is never watched, and nothing else tells. When a watch ends with an error
    kopf ends the operator, but not in all of its releases (seen with kopf 1.45.2).
    """
    names = [task.get_name() for task in asyncio.all_tasks() if not task.done()]
    alive = sum(name.startswith("watcher for ") for name in names)
    if alive < expected:
        raise kopf.PermanentError(f"{alive} of {expected} watches run; a restart of the operator brings them back")
    return alive


def _log_failure(error: Exception, retry_after: float) -> None:
    if isinstance(error, ApiException):
        log.warning("pass_failed", status=error.status, error=message_of(error), retry_after=retry_after)
    elif isinstance(error, OSError | TimeoutError | ClientError):
        log.warning("pass_failed", error=f"{type(error).__name__}: {error}", retry_after=retry_after)
    else:
        log.exception("pass_failed", retry_after=retry_after)


async def _loop(one_pass: Callable[[], Awaitable[float | None]], wakeups: Wakeups, uid: str) -> None:
    """Passes until the job is gone. An error of a pass ends only that pass."""
    failures = 0
    while True:
        try:
            wait = await one_pass()
            failures = 0
        except Gone:
            return
        except Exception as error:
            wait = _BACKOFFS[min(failures, len(_BACKOFFS) - 1)]
            failures += 1
            _log_failure(error, wait)
        if wait != 0:
            await wakeups.wait(uid, wait)

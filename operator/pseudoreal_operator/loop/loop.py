"""The loop: watches tell what changed, a queue holds the jobs to be looked at, and a few workers make passes."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from random import random
from typing import Any, NoReturn

import structlog
from kubernetes.aio.client import ApiException
from pseudoreal_api.names import LABEL_JOB, LABEL_JOB_UID

from pseudoreal_operator.cluster.api import Api, message_of
from pseudoreal_operator.cluster.retry import CONFLICT, UNAVAILABLE, Pause, pause_after
from pseudoreal_operator.cluster.watch import Watch
from pseudoreal_operator.endpoint.identity import Identities
from pseudoreal_operator.loop.queue import WorkQueue
from pseudoreal_operator.loop.reconcile import Gone, Means, reconcile
from pseudoreal_operator.loop.wakeups import Name, Wakeups
from pseudoreal_operator.observe.reading import belongs_to, read_pod

Json = dict[str, Any]

WORKERS = 16
WATCHED_CHILDREN = ("Job", "Pod")
LISTEN_SECONDS = 10.0
"""Between two looks at which pods are silent; they cost no request."""
WATCH_TASK = "watch of "
_BEGIN_SECONDS = 5.0
"""Until the watches run; one that cannot, as in a namespace without rights, must not hold up the others."""

log = structlog.get_logger()


class Loop:
    def __init__(self, means: Means, identities: Identities | None) -> None:
        """`identities` hears of the pods as well, where pods report."""
        self._means, self._identities = means, identities
        self._queue: WorkQueue[Name] = WorkQueue(self._pass, _failed)
        self._wakeups = Wakeups(self._queue)

    @asynccontextmanager
    async def running(self, watching: Api) -> AsyncIterator[None]:
        """`watching` has connections of its own: watches hold theirs."""
        begun: list[asyncio.Event] = []
        tasks: list[asyncio.Task[Any]] = []
        for namespace in self._means.settings.namespaces or (None,):
            for kind in WATCHED_CHILDREN:
                watch = Watch(
                    watching,
                    kind,
                    namespace,
                    LABEL_JOB,
                    partial(self._child_changed, kind),
                    self._changes_missed,
                )
                begun.append(asyncio.Event())
                tasks.append(asyncio.create_task(watch.run(begun[-1]), name=f"{WATCH_TASK}{kind} in {namespace}"))
        tasks.append(asyncio.create_task(self._listen(), name=f"{WATCH_TASK}silent pods"))
        try:
            # Before jobs are looked at: what changes after a look is told.
            with suppress(TimeoutError):
                async with asyncio.timeout(_BEGIN_SECONDS):
                    await asyncio.gather(*(one.wait() for one in begun))
            async with self._means.news.posting(), self._queue.workers(WORKERS):
                yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def _listen(self) -> NoReturn:
        while True:
            await asyncio.sleep(LISTEN_SECONDS)
            self._means.board.wake_silent(datetime.now(UTC))

    def job_changed(self, change: str | None, body: Json) -> None:
        if change == "DELETED":
            self._means.forget(body["metadata"]["namespace"], body["metadata"]["uid"])
        self._wakeups.job_changed(change, body, datetime.now(UTC))

    def _child_changed(self, kind: str, change: str, body: Json) -> None:
        try:
            if kind == "Pod":
                self._pod_changed(change, body)
            self._wakeups.child_changed(change, body)
        # Anybody may label a pod with what is no number.
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            log.warning("child_unreadable", kind=kind, name=body["metadata"].get("name"), error=repr(error))

    def _changes_missed(self) -> None:
        self._wakeups.child_changes_missed()
        if self._identities:
            self._identities.changes_missed()

    def _pod_changed(self, change: str, pod: Json) -> None:
        if self._identities:
            self._identities.pod_changed(change, pod)
        if change == "DELETED":
            self._hear_last_words(pod)

    def _hear_last_words(self, pod: Json) -> None:
        uid = pod["metadata"]["labels"].get(LABEL_JOB_UID, "")
        if belongs_to(uid, pod):
            self._means.words.hear((pod["metadata"]["namespace"], uid), read_pod(pod))

    async def _pass(self, name: Name) -> float | None:
        with structlog.contextvars.bound_contextvars(job=f"{name.namespace}/{name.name}"):
            try:
                return await reconcile(self._means, name, partial(self._queue.add, name))
            except Gone:
                return None


def _failed(name: Name, error: Exception, failures: int) -> Pause:
    pause = pause_after(error, failures, random())
    said = {"job": f"{name.namespace}/{name.name}", "failures": failures, "retry_after": round(pause.seconds, 1)}
    if not isinstance(error, UNAVAILABLE):
        log.error("pass_failed", exc_info=error, **said)
    elif not isinstance(error, ApiException):
        log.warning("pass_failed", error=f"{type(error).__name__}: {error}", **said)
    elif error.status == CONFLICT and failures == 1:
        log.debug("pass_failed", status=error.status, error=message_of(error), **said)
    else:
        log.warning("pass_failed", status=error.status, error=message_of(error), **said)
    return pause

"""The loop: watches tell what changed, a queue holds the jobs to be looked at, and a few workers make passes."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from random import random
from typing import Any, NamedTuple, Protocol

import structlog
from kubernetes.aio.client import ApiException
from pseudoreal_api.base import KIND
from pseudoreal_api.names import LABEL_JOB, LABEL_JOB_UID

from pseudoreal_operator import clock
from pseudoreal_operator.cluster.api import Api, Name, message_of
from pseudoreal_operator.cluster.finalizer import has_finalizer
from pseudoreal_operator.cluster.retry import CONFLICT, UNAVAILABLE, Pause, pause_after
from pseudoreal_operator.cluster.watch import Watch
from pseudoreal_operator.endpoint.identity import Identities
from pseudoreal_operator.loop.census import Census
from pseudoreal_operator.loop.first_look import Rest, first_look
from pseudoreal_operator.loop.logs import read_logs
from pseudoreal_operator.loop.queue import WorkQueue
from pseudoreal_operator.loop.reconcile import Calls, Gone, Means, reconcile
from pseudoreal_operator.metrics.registry import LAST_EVENT, NO_ANSWER, PASS_ERRORS, PASS_SECONDS, WAITING_JOBS
from pseudoreal_operator.observe.reading import belongs_to, read_pod
from pseudoreal_operator.observe.told import Told

Json = dict[str, Any]

WORKERS = 16
WATCHED_CHILDREN = ("Job", "Pod")
WATCH_TASK = "watch of "
_BEGIN_SECONDS = 5.0
"""Seconds to wait until the watches run; one that cannot, for instance in a namespace without rights, must not hold up
the others."""

log = structlog.get_logger()


class Wish(NamedTuple):
    """What is asked of the operator, and whether it is done; most events of a job are the echo of our own status."""

    generation: int
    deleting: bool
    has_finalizer: bool
    ended: bool
    told: bool
    """Whether the job has a status."""


class Queue(Protocol):
    """A queue of passes over jobs."""

    def add(self, key: Name, after: float = 0.0) -> None: ...

    def add_backlog(self, key: Name) -> None: ...

    def forget(self, key: Name) -> None: ...


class Wakeups:
    """What jobs and their children tell a queue: of the watch events those that are news. Little is kept of a job, and
    a number of each child: a pass reads what it needs."""

    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        self._wishes: dict[Name, dict[str, Wish]] = {}
        """The wishes of jobs, by name and uid: events of a job that is gone may come after those of its successor."""
        self._changed: set[Name] | None = None
        """Jobs of which something has changed since the first look began; None before and after it."""
        self._resting: dict[Name, Rest] = {}
        self._told = Told()

    def first_look_begins(self) -> None:
        self._changed = set()

    def rest(self, found: Mapping[Name, Rest]) -> None:
        """Takes what the first look has found: those jobs need no first pass, unless something has changed since."""
        changed, self._changed = self._changed or set(), None
        self._resting = {name: rest for name, rest in found.items() if name not in changed}

    def rest_of(self, name: Name) -> Rest | None:
        """How the job rests, if this is its first pass and nothing has changed since the first look."""
        return self._resting.pop(name, None)

    def has_changed(self, name: Name) -> None:
        """Notes that a pass over the job is to look for itself."""
        self._resting.pop(name, None)
        if self._changed is not None:
            self._changed.add(name)

    def job_changed(self, change: str | None, body: Json, now: datetime) -> None:
        """Takes a change of a job. `change`: None for a job that was there before."""
        name, uid, wish = name_of(body), body["metadata"]["uid"], _wish(body)
        known = self._wishes.get(name, {}).get(uid)
        if change is not None or self._is_newer(name, body):
            self.has_changed(name)
        if change == "DELETED":
            self._drop(name, uid)
            return
        self._wishes.setdefault(name, {})[uid] = wish
        if known is not None and known != wish:
            self._queue.add(name)
        elif known is None and (wait := first_pass(body, now)) is not None:
            self._begin(name, wait, was_there=change is None)

    def wrote(self, body: Json) -> None:
        """Takes a job as a pass has left it. Its wishes are those that the pass has read, but for what it has told."""
        known = self._wishes.get(name_of(body), {})
        if (uid := body["metadata"]["uid"]) in known:
            known[uid] = _wish(body)

    def _begin(self, name: Name, wait: float, *, was_there: bool) -> None:
        """Asks for the first pass over a job. Those that were there before go to the backlog: after a start there may
        be thousands of them."""
        if was_there and wait == 0:
            self._queue.add_backlog(name)
        else:
            self._queue.add(name, wait)

    def _is_newer(self, name: Name, body: Json) -> bool:
        rest = self._resting.get(name)
        return rest is not None and rest.version != body["metadata"]["resourceVersion"]

    def child_changed(self, kind: str, change: str, body: Json) -> None:
        """Takes a change of a child. For a job that has ended, only what still lives is news."""
        if (after := self._told.take(kind, change, body)) is None:
            return
        metadata = body["metadata"]
        name = Name(metadata["namespace"], metadata.get("labels", {}).get(LABEL_JOB, ""))
        self.has_changed(name)
        wishes = self._wishes.get(name, {}).values()
        if any(not wish.ended for wish in wishes) or (wishes and change != "DELETED" and _lives(body)):
            self._queue.add(name, after)

    def child_changes_missed(self) -> None:
        self._told.forget_all()
        for name, wishes in self._wishes.items():
            if any(not wish.ended for wish in wishes.values()):
                self._queue.add_backlog(name)

    def _drop(self, name: Name, uid: str) -> None:
        wishes = self._wishes.get(name, {})
        wishes.pop(uid, None)
        if wishes:
            self._queue.add(name)
        else:
            self._wishes.pop(name, None)
            self._queue.forget(name)


def name_of(body: Json) -> Name:
    return Name(body["metadata"]["namespace"], body["metadata"]["name"])


def first_pass(body: Json, now: datetime) -> float | None:
    """Seconds until a job that was not known needs a pass. None: it has ended, and nothing is to be done about it."""
    wish, spec = _wish(body), body.get("spec") or {}
    if wish.has_finalizer or not (wish.ended or wish.deleting):
        return 0.0
    if wish.deleting:
        return None
    if (spec.get("cleanUp") or {}).get("children") == "Delete":
        return 0.0
    lifetime = (spec.get("deadlines") or {}).get("ttlSecondsAfterFinished")
    done = (body.get("status") or {}).get("completionTime")
    if lifetime is None or done is None:
        return None
    return max(0.0, (clock.from_text(done) + timedelta(seconds=lifetime) - now).total_seconds())


def _wish(body: Json) -> Wish:
    metadata, status = body["metadata"], body.get("status") or {}
    return Wish(
        generation=metadata.get("generation", 0),
        deleting="deletionTimestamp" in metadata,
        has_finalizer=has_finalizer(metadata),
        ended=_holds(status, "Complete") or _holds(status, "Failed"),
        told=bool(status),
    )


def _lives(child: Json) -> bool:
    """Whether the child is a pod or a Job that has not ended."""
    status = child.get("status") or {}
    ended = status.get("phase") in ("Succeeded", "Failed") or _holds(status, "Complete") or _holds(status, "Failed")
    return not ended


def _holds(status: Json, condition: str) -> bool:
    return any(c["type"] == condition and c["status"] == "True" for c in status.get("conditions") or [])


class Loop:
    def __init__(self, means: Means, identities: Identities | None, census: Census) -> None:
        """`identities` hears of the pods as well, where pods report."""
        self._means, self._identities, self._census = means, identities, census
        self._queue: WorkQueue[Name] = WorkQueue(self._pass, _failed)
        self._wakeups = Wakeups(self._queue)
        self._begun: list[asyncio.Event] = []
        """One for each watch: it misses nothing any more."""
        self._leads = False
        census.be_silent()
        WAITING_JOBS.set_function(lambda: self._queue.depth if self._leads else 0)

    @asynccontextmanager
    async def watching(self, api: Api) -> AsyncIterator[None]:
        """Watches, and makes no pass. `api` has connections of its own: watches hold theirs."""
        tasks: list[asyncio.Task[Any]] = []
        for namespace in self._means.settings.namespaces or (None,):
            for kind in WATCHED_CHILDREN:
                told = partial(self._child_changed, kind)
                watch = Watch(api, kind, namespace, LABEL_JOB, told, self._changes_missed)
                self._begun.append(asyncio.Event())
                running = watch.run(self._begun[-1])
                tasks.append(asyncio.create_task(running, name=f"{WATCH_TASK}{kind} in {namespace}"))
        logs = read_logs(self._means.api, self._means.board)
        tasks.append(asyncio.create_task(logs, name=f"{WATCH_TASK}silent pods"))
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    @asynccontextmanager
    async def leading(self) -> AsyncIterator[None]:
        """Makes passes, first over all jobs."""
        # Before jobs are looked at: what changes after a look is told.
        with suppress(TimeoutError):
            async with asyncio.timeout(_BEGIN_SECONDS):
                await asyncio.gather(*(one.wait() for one in self._begun))
        self._leads = True
        self._census.speak()
        await self._first_look()
        async with self._means.news.posting(), self._queue.workers(WORKERS):
            yield

    def use_authorities(self, authorities: str) -> None:
        """Gives the pods of new executions other authorities by which they know the operator."""
        settings = replace(self._means.settings, report_ca=authorities or None)
        self._means = replace(self._means, settings=settings)

    async def _first_look(self) -> None:
        resting: dict[Name, Rest] = {}
        self._wakeups.first_look_begins()
        try:
            resting = await first_look(self._means, self._heard_of)
        # An object that was cut off is no JSON.
        except (*UNAVAILABLE, ValueError) as error:
            log.info("first_look_failed", error=f"{type(error).__name__}: {error}")
        self._wakeups.rest(resting)
        log.info("first_look", resting=len(resting))

    def _heard_of(self, name: Name, after: float) -> None:
        self._wakeups.has_changed(name)
        self._queue.add(name, after)

    def job_changed(self, change: str | None, body: Json) -> None:
        # A pass forgets jobs that have ended, and who does not lead makes none.
        if change == "DELETED" or (not self._leads and _wish(body).ended):
            self._means.forget(body["metadata"]["namespace"], body["metadata"]["uid"])
        self._wakeups.job_changed(change, body, datetime.now(UTC))
        LAST_EVENT.labels(kind=KIND, namespace="").set_to_current_time()
        self._census.see(change, body)

    def _child_changed(self, kind: str, change: str, body: Json) -> None:
        try:
            if kind == "Pod":
                self._pod_changed(change, body)
            self._wakeups.child_changed(kind, change, body)
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
        if rest := self._wakeups.rest_of(name):
            return rest.wait
        with structlog.contextvars.bound_contextvars(job=f"{name.namespace}/{name.name}"):
            try:
                with PASS_SECONDS.time():
                    calls = Calls(partial(self._queue.add, name), self._wakeups.wrote)
                    return await reconcile(self._means, name, calls)
            except Gone:
                self._census.forget(name)
                return None


def _failed(name: Name, error: Exception, failures: int) -> Pause:
    PASS_ERRORS.labels(code=code_of(error)).inc()
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


def code_of(error: Exception) -> str:
    """How a failed pass is counted."""
    if isinstance(error, ApiException):
        return str(error.status)
    return NO_ANSWER if isinstance(error, UNAVAILABLE) else "internal"

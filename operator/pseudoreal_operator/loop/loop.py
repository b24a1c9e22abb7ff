"""The loop: watches tell what changed, a queue holds the jobs to be looked at, and a few workers make passes."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from random import random
from typing import Any, NamedTuple, NoReturn, Protocol

import structlog
from kubernetes.aio.client import ApiException
from pseudoreal_api.names import LABEL_JOB, LABEL_JOB_UID

from pseudoreal_operator import clock
from pseudoreal_operator.cluster.api import Api, Name, message_of
from pseudoreal_operator.cluster.bounds import Unreadable
from pseudoreal_operator.cluster.fence import Fence
from pseudoreal_operator.cluster.finalizer import has_finalizer
from pseudoreal_operator.cluster.retry import CONFLICT, UNAVAILABLE, Pause, pause_after
from pseudoreal_operator.cluster.watch import Watch
from pseudoreal_operator.endpoint.identity import Identities
from pseudoreal_operator.loop.census import Census
from pseudoreal_operator.loop.first_look import Rest, first_look
from pseudoreal_operator.loop.logs import read_logs
from pseudoreal_operator.loop.queue import WorkQueue
from pseudoreal_operator.loop.reconcile import Calls, Gone, Means, reconcile
from pseudoreal_operator.metrics.registry import NO_ANSWER, PASS_ERRORS, PASS_SECONDS, WAITING_JOBS
from pseudoreal_operator.observe.reading import belongs_to, read_pod
from pseudoreal_operator.observe.told import Told
from pseudoreal_operator.tasks import running

Json = dict[str, Any]

WORKERS = 16
WATCHED_CHILDREN = ("Job", "Pod")
RESYNC_SECONDS = 36_000.0
"""Seconds after which a job is looked at though nothing has changed: should a change ever be taken for none."""
_CHILDREN_AT_ONCE, _SECONDS_PER_CHILD = 500, 0.001
"""Number of children that a pass lists without a pause after it, and seconds of the pause for each of the others: a job
of 10,000 pods is listed at most every ten seconds."""
_MOST_PAUSE_SECONDS = 10.0
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

    def uids_of(self, name: Name) -> frozenset[str]:
        """Uids of the jobs of that name that were told."""
        return frozenset(self._wishes.get(name, {}))

    def gone(self, name: Name, uids: frozenset[str]) -> None:
        """Takes that jobs are gone, though nothing may have told so."""
        wishes = self._wishes.get(name, {})
        for uid in uids:
            wishes.pop(uid, None)
        if not wishes:
            self._wishes.pop(name, None)

    def listed(self, names: set[Name], known: frozenset[Name]) -> None:
        """Takes a list of all jobs, that was begun when those of `known` were known."""
        for name in known - names:
            self._queue.add_backlog(name)

    def known(self) -> frozenset[Name]:
        return frozenset(self._wishes)

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
    def __init__(self, means: Means, identities: Identities | None, census: Census, fence: Fence | None = None) -> None:
        """`identities` hears of the pods as well, where pods report. While `fence` is closed no pass begins: it could
        write nothing."""
        self._means, self._identities, self._census = means, identities, census
        self._queue: WorkQueue[Name] = WorkQueue(
            self._pass, _failed, group=lambda name: name.namespace, is_open=lambda: fence is None or fence.is_open
        )
        self._wakeups = Wakeups(self._queue)
        self._begun: list[asyncio.Event] = []
        """One for each watch of children: it misses nothing any more."""
        self._jobs_missed = asyncio.Event()
        self._jobs_listed = asyncio.Event()
        self._told_meanwhile: set[str] | None = None
        """Uids of jobs of which a change was told since a list of all jobs was asked for: the list may be older. None
        while no list is asked for."""
        self._leads = False
        census.be_silent()
        WAITING_JOBS.set_function(lambda: self._queue.depth if self._leads else 0)

    @property
    def live_watches(self) -> int:
        """Number of watches of children that have begun."""
        return sum(begun.is_set() for begun in self._begun)

    @property
    def has_seen_all(self) -> bool:
        """Whether all jobs and their children have been seen once, and are watched since then."""
        return self._jobs_listed.is_set() and all(begun.is_set() for begun in self._begun)

    @asynccontextmanager
    async def watching(self, api: Api) -> AsyncIterator[None]:
        """Watches, and makes no pass. `api` has connections of its own: watches hold theirs."""
        async with AsyncExitStack() as stack:
            for namespace in self._means.settings.namespaces or (None,):
                for kind in WATCHED_CHILDREN:
                    told = partial(self._child_changed, kind)
                    watch = Watch(api, kind, namespace, LABEL_JOB, told, self._changes_missed)
                    self._begun.append(asyncio.Event())
                    name = f"watch of {kind} in {namespace or 'all namespaces'}"
                    await stack.enter_async_context(running(name, watch.run(self._begun[-1])))
            await stack.enter_async_context(running("list of jobs", self._list_jobs()))
            logs = read_logs(self._means.api, self._means.board)
            await stack.enter_async_context(running("watch of silent pods", logs))
            yield

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
        async with self._means.news.posting(), self._queue.workers(WORKERS, "worker of passes"):
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
        # Whatever it is: then all jobs have a pass.
        except Exception as error:
            log.info("first_look_failed", error=f"{type(error).__name__}: {error}")
        self._wakeups.rest(resting)
        log.info("first_look", resting=len(resting))

    def _heard_of(self, name: Name, after: float) -> None:
        self._wakeups.has_changed(name)
        self._queue.add(name, after)

    def jobs_missed(self) -> None:
        """Takes that changes of jobs may have been missed: all are listed."""
        self._told_meanwhile = set()
        self._jobs_missed.set()

    async def _list_jobs(self) -> NoReturn:
        """Lists all jobs whenever changes may have been missed."""
        failures = 0
        while True:
            await self._jobs_missed.wait()
            self._jobs_missed.clear()
            try:
                await self._list_jobs_once()
                failures = 0
                self._jobs_listed.set()
                if not self._jobs_missed.is_set():
                    self._told_meanwhile = None
            except Exception as error:
                failures += 1
                self._jobs_missed.set()
                pause = min(pause_after(error, failures, random()).seconds, _MOST_PAUSE_SECONDS)
                log.warning("jobs_not_listed", error=f"{type(error).__name__}: {error}", again_in=round(pause, 1))
                await asyncio.sleep(pause)

    async def _list_jobs_once(self) -> None:
        known, found = self._wakeups.known(), set[Name]()

        def skipped(body: Json, _reason: Unreadable) -> None:
            with suppress(KeyError):
                found.add(name_of(body))
                self.job_unreadable(*name_of(body))

        for namespace in self._means.settings.namespaces or (None,):
            async for body in self._means.api.each("PseudoRealJob", namespace, skipped=skipped):
                found.add(name_of(body))
                if body["metadata"]["uid"] not in (self._told_meanwhile or ()):
                    self.job_changed(None, body)
                # The Lease is renewed meanwhile.
                await asyncio.sleep(0)
        self._wakeups.listed(found, known)

    def job_changed(self, change: str | None, body: Json) -> None:
        try:
            if change is not None and self._told_meanwhile is not None:
                self._told_meanwhile.add(body["metadata"]["uid"])
            # A pass forgets jobs that have ended, and who does not lead makes none.
            if change == "DELETED" or (not self._leads and _wish(body).ended):
                self._means.forget(body["metadata"]["namespace"], body["metadata"]["uid"])
            self._wakeups.job_changed(change, body, datetime.now(UTC))
            self._census.see(change, body)
        except Exception as error:  # the pass over the job tells what is wrong
            metadata = body.get("metadata") or {}
            log.warning("job_unreadable", name=metadata.get("name"), error=repr(error))
            self.job_unreadable(str(metadata.get("namespace")), str(metadata.get("name")))

    def job_unreadable(self, namespace: str, name: str) -> None:
        """Takes a change of a job that cannot be read: a pass says so in its status."""
        self._heard_of(Name(namespace, name), 0.0)

    def _child_changed(self, kind: str, change: str, body: Json) -> None:
        takers: list[Callable[[str, Json], None]] = [self._pod_changed] if kind == "Pod" else []
        takers.append(partial(self._wakeups.child_changed, kind))
        for take in takers:
            try:
                take(change, body)
            except Exception as error:  # anybody may label anything
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
            return _resynced(rest.wait)
        known = self._wakeups.uids_of(name)
        with structlog.contextvars.bound_contextvars(job=f"{name.namespace}/{name.name}"):
            try:
                with PASS_SECONDS.time():
                    calls = Calls(partial(self._queue.add, name), self._wakeups.wrote, partial(self._listed, name))
                    return _resynced(await reconcile(self._means, name, calls))
            except Gone:
                self._census.forget(name)
                self._wakeups.gone(name, known)
                return None

    def _listed(self, name: Name, children: int) -> None:
        """Takes how many children a pass has listed."""
        if children > _CHILDREN_AT_ONCE:
            self._queue.hold(name, (children - _CHILDREN_AT_ONCE) * _SECONDS_PER_CHILD)


def _resynced(wait: float | None) -> float:
    """The wait, and no longer than until a look that nothing asked for; those of all jobs are spread."""
    most = RESYNC_SECONDS * (1 - random() / 4)
    return most if wait is None else min(wait, most)


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

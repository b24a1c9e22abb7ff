"""The loop: watches report changes, a queue holds the jobs that need a reconcile pass, and a few workers make the
passes."""

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
from pseudoreal_operator.cluster.retry import CONFLICT, UNAVAILABLE, Pause, pause_after
from pseudoreal_operator.cluster.watch import Watch
from pseudoreal_operator.endpoint.identity import Identities
from pseudoreal_operator.loop.initial_list import IdleJob, find_idle_jobs
from pseudoreal_operator.loop.job_metrics import JobMetrics
from pseudoreal_operator.loop.logs import read_logs
from pseudoreal_operator.loop.queue import WorkQueue
from pseudoreal_operator.loop.reconcile import Callbacks, Dependencies, JobDeleted, reconcile
from pseudoreal_operator.metrics.registry import NO_ANSWER, PASS_ERRORS, PASS_SECONDS, WAITING_JOBS
from pseudoreal_operator.observe.change_filter import ChangeFilter
from pseudoreal_operator.observe.reading import belongs_to, read_pod
from pseudoreal_operator.tasks import running

Json = dict[str, Any]

WORKERS = 16
WATCHED_CHILDREN = ("Job", "Pod")
RESYNC_SECONDS = 36_000.0
"""Seconds after which a job is reconciled although nothing changed, in case a change was ever taken for none."""
_CHILDREN_AT_ONCE, _SECONDS_PER_CHILD = 500, 0.001
"""Number of children that a pass lists without a pause after it, and seconds of pause for each further child: a job
of 10,000 pods is listed at most every ten seconds."""
_MOST_PAUSE_SECONDS = 10.0
_BEGIN_SECONDS = 5.0
"""Seconds to wait until all watches run. A watch that cannot start, for instance in a namespace without permissions,
must not hold up the others."""

log = structlog.get_logger()


class JobSummary(NamedTuple):
    """Summary of a job: a pass is due when it changes. Most events of a job are the echo of the operator's own
    status writes."""

    generation: int
    deleting: bool
    ended: bool
    has_status: bool
    """Whether the job has a status."""


class Queue(Protocol):
    """Interface of the work queue: passes over jobs."""

    def add(self, key: Name, after: float = 0.0) -> None: ...

    def add_backlog(self, key: Name) -> None: ...

    def forget(self, key: Name) -> None: ...


class EventRouter:
    """Event router: forwards to a queue those watch events of jobs and children that change anything for a pass. It
    keeps a summary of each job and a hash of each child; a pass reads everything else itself."""

    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        self._summaries: dict[Name, dict[str, JobSummary]] = {}
        """Summaries of jobs, by name and uid: events of a deleted job may arrive after events of its successor."""
        self._changed: set[Name] | None = None
        """Jobs that have changed since the initial list began; None before and after the initial list."""
        self._idle: dict[Name, IdleJob] = {}
        self._filter = ChangeFilter()

    def initial_list_begins(self) -> None:
        self._changed = set()

    def store_idle_jobs(self, found: Mapping[Name, IdleJob]) -> None:
        """Store the result of the initial list: these jobs need no first pass, unless they have changed since."""
        changed, self._changed = self._changed or set(), None
        self._idle = {name: idle for name, idle in found.items() if name not in changed}

    def take_idle_job(self, name: Name) -> IdleJob | None:
        """Return the idle job, if this is its first pass and it has not changed since the initial list; else
        None."""
        return self._idle.pop(name, None)

    def invalidate_initial_list(self, name: Name) -> None:
        """Discard the initial list's result for the job: its next pass reads the job itself."""
        self._idle.pop(name, None)
        if self._changed is not None:
            self._changed.add(name)

    def job_changed(self, change: str | None, body: Json, now: datetime) -> None:
        """Process a change of a job. `change`: the event type; None for a job that was there before."""
        name, uid, summary = name_of(body), body["metadata"]["uid"], _summary_of(body)
        known = self._summaries.get(name, {}).get(uid)
        if change is not None or self._is_newer(name, body):
            self.invalidate_initial_list(name)
        if change == "DELETED":
            self._drop(name, uid)
            return
        self._summaries.setdefault(name, {})[uid] = summary
        if known is not None and known != summary:
            self._queue.add(name)
        elif known is None and (wait := first_pass(body, now)) is not None:
            self._begin(name, wait, was_there=change is None)

    def status_written(self, body: Json) -> None:
        """Store the summary of a job that a pass has just written, so that the watch event of this write causes no
        pass. The write succeeds only at the version that the pass has read, so nothing but the status is newer."""
        known = self._summaries.get(name_of(body), {})
        if (uid := body["metadata"]["uid"]) in known:
            known[uid] = _summary_of(body)

    def uids_of(self, name: Name) -> frozenset[str]:
        """Return the uids of the known jobs of that name."""
        return frozenset(self._summaries.get(name, {}))

    def gone(self, name: Name, uids: frozenset[str]) -> None:
        """Forget jobs that are gone, although a watch may not have reported it."""
        summaries = self._summaries.get(name, {})
        for uid in uids:
            summaries.pop(uid, None)
        if not summaries:
            self._summaries.pop(name, None)

    def listed(self, names: set[Name], known: frozenset[Name]) -> None:
        """Queue a pass over each known job that a list of all jobs lacks. `known`: the jobs known when the list
        began."""
        for name in known - names:
            self._queue.add_backlog(name)

    def known(self) -> frozenset[Name]:
        return frozenset(self._summaries)

    def _begin(self, name: Name, wait: float, *, was_there: bool) -> None:
        """Request the first pass over a job. Jobs that were there before go to the backlog: after a start there may
        be thousands of them."""
        if was_there and wait == 0:
            self._queue.add_backlog(name)
        else:
            self._queue.add(name, wait)

    def _is_newer(self, name: Name, body: Json) -> bool:
        idle = self._idle.get(name)
        return idle is not None and idle.version != body["metadata"]["resourceVersion"]

    def child_changed(self, kind: str, change: str, body: Json) -> None:
        """Queue the job of a changed child. If the job has ended, only a child that is still alive needs a pass."""
        if (delay := self._filter.delay(kind, change, body)) is None:
            return
        metadata = body["metadata"]
        name = Name(metadata["namespace"], metadata.get("labels", {}).get(LABEL_JOB, ""))
        self.invalidate_initial_list(name)
        summaries = self._summaries.get(name, {}).values()
        if any(not summary.ended for summary in summaries) or (summaries and change != "DELETED" and _lives(body)):
            self._queue.add(name, delay)

    def child_changes_missed(self) -> None:
        self._filter.forget_all()
        for name, summaries in self._summaries.items():
            if any(not summary.ended for summary in summaries.values()):
                self._queue.add_backlog(name)

    def _drop(self, name: Name, uid: str) -> None:
        summaries = self._summaries.get(name, {})
        summaries.pop(uid, None)
        if summaries:
            self._queue.add(name)
        else:
            self._summaries.pop(name, None)
            self._queue.forget(name)


def name_of(body: Json) -> Name:
    return Name(body["metadata"]["namespace"], body["metadata"]["name"])


def first_pass(body: Json, now: datetime) -> float | None:
    """Return the seconds until a newly found job needs a pass; None: it has ended or is being deleted, and nothing
    is left to do."""
    summary, spec = _summary_of(body), body.get("spec") or {}
    if not (summary.ended or summary.deleting):
        return 0.0
    if summary.deleting:
        return None
    if (spec.get("cleanUp") or {}).get("children") == "Delete":
        return 0.0
    lifetime = (spec.get("deadlines") or {}).get("ttlSecondsAfterFinished")
    done = (body.get("status") or {}).get("completionTime")
    if lifetime is None or done is None:
        return None
    return max(0.0, (clock.from_text(done) + timedelta(seconds=lifetime) - now).total_seconds())


def _summary_of(body: Json) -> JobSummary:
    metadata, status = body["metadata"], body.get("status") or {}
    return JobSummary(
        generation=metadata.get("generation", 0),
        deleting="deletionTimestamp" in metadata,
        ended=_holds(status, "Complete") or _holds(status, "Failed"),
        has_status=bool(status),
    )


def _lives(child: Json) -> bool:
    """Return whether the child is a pod or a Job that has not ended."""
    status = child.get("status") or {}
    ended = status.get("phase") in ("Succeeded", "Failed") or _holds(status, "Complete") or _holds(status, "Failed")
    return not ended


def _holds(status: Json, condition: str) -> bool:
    return any(c["type"] == condition and c["status"] == "True" for c in status.get("conditions") or [])


class Loop:
    """Watches and passes of one operator, in its event loop. Every operator watches; only the leader makes passes."""

    def __init__(
        self, deps: Dependencies, identities: Identities | None, job_metrics: JobMetrics, fence: Fence | None = None
    ) -> None:
        """`identities` receives the changes of pods as well, if pods report. While `fence` is closed no pass starts,
        because it could write nothing."""
        self._deps, self._identities, self._job_metrics = deps, identities, job_metrics
        self._queue: WorkQueue[Name] = WorkQueue(
            self._pass, _failed, group=lambda name: name.namespace, is_open=lambda: fence is None or fence.is_open
        )
        self._router = EventRouter(self._queue)
        self._begun: list[asyncio.Event] = []
        """One event for each watch of children, set once the watch misses no change any more."""
        self._jobs_missed = asyncio.Event()
        self._jobs_listed = asyncio.Event()
        self._changed_meanwhile: set[str] | None = None
        """Uids of jobs that changed since a list of all jobs was requested: the list may hold older versions. None:
        no list is requested."""
        self._leads = False
        job_metrics.pause()
        WAITING_JOBS.set_function(lambda: self._queue.depth if self._leads else 0)

    @property
    def live_watches(self) -> int:
        """Number of watches of children that have started."""
        return sum(begun.is_set() for begun in self._begun)

    @property
    def has_seen_all(self) -> bool:
        """Whether all jobs and their children have been listed once, and are watched since then."""
        return self._jobs_listed.is_set() and all(begun.is_set() for begun in self._begun)

    @asynccontextmanager
    async def watching(self, api: Api) -> AsyncIterator[None]:
        """Watch, without making passes. `api` has its own connections, because each watch occupies one."""
        async with AsyncExitStack() as stack:
            for namespace in self._deps.settings.namespaces or (None,):
                for kind in WATCHED_CHILDREN:
                    told = partial(self._child_changed, kind)
                    watch = Watch(api, kind, namespace, LABEL_JOB, told, self._changes_missed)
                    self._begun.append(asyncio.Event())
                    name = f"watch of {kind} in {namespace or 'all namespaces'}"
                    await stack.enter_async_context(running(name, watch.run(self._begun[-1])))
            await stack.enter_async_context(running("list of jobs", self._list_jobs()))
            logs = read_logs(self._deps.api, self._deps.report_store)
            await stack.enter_async_context(running("watch of silent pods", logs))
            yield

    @asynccontextmanager
    async def leading(self) -> AsyncIterator[None]:
        """Make passes, first over all jobs."""
        # Wait for the watches before the initial list, so that every change after the list is reported.
        with suppress(TimeoutError):
            async with asyncio.timeout(_BEGIN_SECONDS):
                await asyncio.gather(*(one.wait() for one in self._begun))
        self._leads = True
        self._job_metrics.resume()
        await self._make_initial_list()
        async with self._deps.event_recorder.posting(), self._queue.workers(WORKERS, "worker of passes"):
            yield

    def use_authorities(self, authorities: str) -> None:
        """Set the certificate authorities by which the pods of new executions verify the operator."""
        settings = replace(self._deps.settings, report_ca=authorities or None)
        self._deps = replace(self._deps, settings=settings)

    async def _make_initial_list(self) -> None:
        idle: dict[Name, IdleJob] = {}
        self._router.initial_list_begins()
        try:
            idle = await find_idle_jobs(self._deps, self._heard_of)
        # Whatever the error is, all jobs then have a pass.
        except Exception as error:
            log.info("first_look_failed", error=f"{type(error).__name__}: {error}")
        self._router.store_idle_jobs(idle)
        log.info("first_look", resting=len(idle))

    def _heard_of(self, name: Name, after: float) -> None:
        self._router.invalidate_initial_list(name)
        self._queue.add(name, after)

    def jobs_missed(self) -> None:
        """Request a list of all jobs, because changes may have been missed."""
        self._changed_meanwhile = set()
        self._jobs_missed.set()

    async def _list_jobs(self) -> NoReturn:
        """List all jobs whenever changes may have been missed."""
        failures = 0
        while True:
            await self._jobs_missed.wait()
            self._jobs_missed.clear()
            try:
                await self._list_jobs_once()
                failures = 0
                self._jobs_listed.set()
                if not self._jobs_missed.is_set():
                    self._changed_meanwhile = None
            except Exception as error:
                failures += 1
                self._jobs_missed.set()
                pause = min(pause_after(error, failures, random()).seconds, _MOST_PAUSE_SECONDS)
                log.warning("jobs_not_listed", error=f"{type(error).__name__}: {error}", again_in=round(pause, 1))
                await asyncio.sleep(pause)

    async def _list_jobs_once(self) -> None:
        known, found = self._router.known(), set[Name]()

        def skipped(body: Json, _reason: Unreadable) -> None:
            with suppress(KeyError):
                found.add(name_of(body))
                self.job_unreadable(*name_of(body))

        for namespace in self._deps.settings.namespaces or (None,):
            async for body in self._deps.api.each("PseudoRealJob", namespace, skipped=skipped):
                found.add(name_of(body))
                if body["metadata"]["uid"] not in (self._changed_meanwhile or ()):
                    self.job_changed(None, body)
                # Yield to the other tasks, such as the renewal of the Lease.
                await asyncio.sleep(0)
        self._router.listed(found, known)

    def job_changed(self, change: str | None, body: Json) -> None:
        try:
            if change is not None and self._changed_meanwhile is not None:
                self._changed_meanwhile.add(body["metadata"]["uid"])
            # The leader's passes forget jobs that have ended. A standby makes no passes, so it forgets them here.
            if change == "DELETED" or (not self._leads and _summary_of(body).ended):
                self._deps.forget(body["metadata"]["namespace"], body["metadata"]["uid"])
            self._router.job_changed(change, body, datetime.now(UTC))
            self._job_metrics.job_changed(change, body)
        except Exception as error:  # the pass over the job reports the error
            metadata = body.get("metadata") or {}
            log.warning("job_unreadable", name=metadata.get("name"), error=repr(error))
            self.job_unreadable(str(metadata.get("namespace")), str(metadata.get("name")))

    def job_unreadable(self, namespace: str, name: str) -> None:
        """Queue a pass over a job that cannot be read; the pass reports this in the job's status."""
        self._heard_of(Name(namespace, name), 0.0)

    def _child_changed(self, kind: str, change: str, body: Json) -> None:
        takers: list[Callable[[str, Json], None]] = [self._pod_changed] if kind == "Pod" else []
        takers.append(partial(self._router.child_changed, kind))
        for take in takers:
            try:
                take(change, body)
            except Exception as error:  # anyone can put the operator's labels on a malformed object
                log.warning("child_unreadable", kind=kind, name=body["metadata"].get("name"), error=repr(error))

    def _changes_missed(self) -> None:
        self._router.child_changes_missed()
        if self._identities:
            self._identities.changes_missed()

    def _pod_changed(self, change: str, pod: Json) -> None:
        if self._identities:
            self._identities.pod_changed(change, pod)
        if change == "DELETED":
            self._store_termination_message(pod)

    def _store_termination_message(self, pod: Json) -> None:
        uid = pod["metadata"]["labels"].get(LABEL_JOB_UID, "")
        if belongs_to(uid, pod):
            self._deps.termination_messages.store((pod["metadata"]["namespace"], uid), read_pod(pod))

    async def _pass(self, name: Name) -> float | None:
        if idle := self._router.take_idle_job(name):
            return _resynced(idle.wait)
        known = self._router.uids_of(name)
        with structlog.contextvars.bound_contextvars(job=f"{name.namespace}/{name.name}"):
            try:
                with PASS_SECONDS.time():
                    callbacks = Callbacks(
                        partial(self._queue.add, name), self._router.status_written, partial(self._listed, name)
                    )
                    return _resynced(await reconcile(self._deps, name, callbacks))
            except JobDeleted:
                self._job_metrics.forget(name)
                self._router.gone(name, known)
                return None

    def _listed(self, name: Name, children: int) -> None:
        """Delay the next pass over a job in proportion to the children that a pass has listed."""
        if children > _CHILDREN_AT_ONCE:
            self._queue.hold(name, (children - _CHILDREN_AT_ONCE) * _SECONDS_PER_CHILD)


def _resynced(wait: float | None) -> float:
    """Return the wait, limited to the resync interval, which varies at random so that jobs are not resynced
    together."""
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
    """Return the label under which a failed pass is counted."""
    if isinstance(error, ApiException):
        return str(error.status)
    return NO_ANSWER if isinstance(error, UNAVAILABLE) else "internal"

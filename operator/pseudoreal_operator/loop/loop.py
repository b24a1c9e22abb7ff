"""The loop: watches report changes, a queue holds the jobs that need a reconcile pass, and a few workers make the
passes."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from random import random
from typing import Any, NoReturn

import structlog
from aiohttp import ClientError
from kubernetes.aio.client import ApiException
from pseudoreal_api.names import CONTAINER, LABEL_JOB, LABEL_JOB_UID

from pseudoreal_operator.cluster.api import Api, Name, message_of
from pseudoreal_operator.cluster.bounds import Unreadable
from pseudoreal_operator.cluster.fence import Fence
from pseudoreal_operator.cluster.retry import API_ERRORS, CONFLICT, Backoff, backoff_after
from pseudoreal_operator.cluster.watch import Watch
from pseudoreal_operator.endpoint.identity import Identities
from pseudoreal_operator.endpoint.limits import Limiter
from pseudoreal_operator.loop.event_router import EventRouter, name_of, summary_of
from pseudoreal_operator.loop.initial_list import IdleJob, find_idle_jobs
from pseudoreal_operator.loop.job_metrics import JobMetrics
from pseudoreal_operator.loop.queue import WorkQueue
from pseudoreal_operator.loop.reconcile import Callbacks, Dependencies, JobDeleted, reconcile
from pseudoreal_operator.metrics.registry import (
    NO_ANSWER,
    PASS_ERRORS,
    PASS_SECONDS,
    PATH_CUT,
    REPORTING_JOBS,
    WAITING_JOBS,
)
from pseudoreal_operator.observe.memory import KINDS
from pseudoreal_operator.observe.reading import LOG_LINES, belongs_to, newest_report, read_pod
from pseudoreal_operator.observe.report_store import ReportingPod, ReportStore
from pseudoreal_operator.tasks import background_task

Json = dict[str, Any]

WORKERS = 16
RESYNC_SECONDS = 36_000.0
"""Maximum seconds between two passes over a job without changes, in case a change was missed."""
_CHILDREN_AT_ONCE, _SECONDS_PER_CHILD = 500, 0.001
"""Number of children that a pass may list without a pause afterwards, and seconds of pause for each further child. A
job of 10,000 pods is listed about every ten seconds at most."""
_MOST_PAUSE_SECONDS = 10.0
_START_SECONDS = 5.0
"""Maximum seconds to wait for the start of all watches. A watch that cannot start, for instance in a namespace without
permissions, must not hold up the others."""

UNREADABLE_SECONDS = 60.0
"""Minimum seconds between two passes over an unreadable job, however often the job changes: such a job may have
megabytes, and each pass requests all of it."""

PAUSE_SECONDS = 1.0
"""Seconds between two requests for logs of silent pods."""

log = structlog.get_logger()


class Loop:
    """Watches and passes of one operator, in its event loop. Every operator watches; only the leader makes passes."""

    def __init__(
        self, deps: Dependencies, identities: Identities | None, job_metrics: JobMetrics, fence: Fence | None = None
    ) -> None:
        """`identities` receives the changes of pods as well, if pods report. While `fence` is closed no pass starts,
        because it could write nothing."""
        self._deps, self._identities, self._job_metrics = deps, identities, job_metrics
        self._queue: WorkQueue[Name] = WorkQueue(
            self._pass, _log_failure, group=lambda name: name.namespace, is_open=lambda: fence is None or fence.is_open
        )
        self._memory = deps.memory
        self._router = EventRouter(self._queue, self._memory)
        self._started: list[asyncio.Event] = []
        """One event for each watch of children, set once the watch misses no more changes."""
        self._job_changes_missed = asyncio.Event()
        self._jobs_listed = asyncio.Event()
        self._changed_meanwhile: set[str] | None = None
        """Uids of jobs that have changed during the list in progress: the list may hold older versions of them. None:
        no list is in progress."""
        self._unreadable_limit = Limiter(per_second=1 / UNREADABLE_SECONDS, burst=1)
        self._leads = False
        job_metrics.pause()
        WAITING_JOBS.set_function(lambda: self._queue.depth if self._leads else 0)

    @property
    def live_watches(self) -> int:
        """Number of watches of children that have started."""
        return sum(started.is_set() for started in self._started)

    @property
    def has_seen_all(self) -> bool:
        """Whether all jobs and their children have been listed once, and are watched since then."""
        return self._jobs_listed.is_set() and all(started.is_set() for started in self._started)

    @asynccontextmanager
    async def run_watches(self, api: Api) -> AsyncIterator[None]:
        """Run the watches of children, the list of jobs and the reader of logs in this context, without making passes.
        `api` has its own connections, because each watch occupies one."""
        async with AsyncExitStack() as stack:
            for namespace in self._deps.settings.namespaces or (None,):
                for kind in KINDS:
                    on_change = partial(self._child_changed, kind)
                    store = self._memory.watch(kind, namespace)
                    watch = Watch(api, kind, namespace, LABEL_JOB, store, on_change, self._child_changes_missed)
                    self._started.append(asyncio.Event())
                    name = f"watch of {kind} in {namespace or 'all namespaces'}"
                    await stack.enter_async_context(background_task(name, watch.run(self._started[-1])))
            await stack.enter_async_context(background_task("list of jobs", self._list_jobs()))
            logs = read_logs(self._deps.api, self._deps.report_store)
            await stack.enter_async_context(background_task("watch of silent pods", logs))
            yield

    @asynccontextmanager
    async def lead(self) -> AsyncIterator[None]:
        """Make passes in this context, after the initial list of all jobs."""
        # Wait for the watches before the initial list, so that every change after the list is reported.
        with suppress(TimeoutError):
            async with asyncio.timeout(_START_SECONDS):
                await asyncio.gather(*(one.wait() for one in self._started))
        self._leads = True
        self._job_metrics.resume()
        await self._make_initial_list()
        async with self._deps.event_recorder.run_posters(), self._queue.run_workers(WORKERS, "worker of passes"):
            yield

    def use_authorities(self, authorities: str) -> None:
        """Set the certificate authorities by which the pods of new executions verify the operator."""
        settings = replace(self._deps.settings, report_ca=authorities or None)
        self._deps = replace(self._deps, settings=settings)

    async def _make_initial_list(self) -> None:
        idle: dict[Name, IdleJob] = {}
        self._router.begin_initial_list()
        try:
            idle = await find_idle_jobs(self._deps, self._queue_pass)
        # After any error, no job counts as idle, so each job has its first pass.
        except Exception as error:
            log.info("initial_list_failed", error=f"{type(error).__name__}: {error}")
        self._router.store_idle_jobs(idle)
        log.info("initial_list_completed", idle_jobs=len(idle))

    def _queue_pass(self, name: Name, after: float) -> None:
        self._router.invalidate_initial_list(name)
        self._queue.add(name, after)

    def jobs_unwatched(self) -> None:
        """Note that the watch of jobs has ended; `job_changes_missed` follows once it has begun again."""
        self._memory.jobs_unwatched()

    def job_changes_missed(self) -> None:
        """Request a list of all jobs, because changes may have been missed."""
        self._memory.jobs_missed()
        self._job_changes_missed.set()

    async def _list_jobs(self) -> NoReturn:
        """List all jobs whenever changes may have been missed."""
        failures = 0
        while True:
            await self._job_changes_missed.wait()
            self._job_changes_missed.clear()
            try:
                await self._list_jobs_once()
                failures = 0
                self._jobs_listed.set()
            except Exception as error:
                failures += 1
                self._job_changes_missed.set()
                pause = min(backoff_after(error, failures, random()).seconds, _MOST_PAUSE_SECONDS)
                log.warning("job_list_failed", error=f"{type(error).__name__}: {error}", retry_after=round(pause, 1))
                await asyncio.sleep(pause)

    async def _list_jobs_once(self) -> None:
        """List the jobs of each namespace that has not been listed since changes may have been missed. A namespace
        without permissions must not keep the memory from the others: its error is raised after their lists."""
        errors = list[Exception]()
        for namespace in self._deps.settings.namespaces or (None,):
            if self._memory.has_jobs_of(namespace):
                continue
            self._changed_meanwhile = set()
            try:
                await self._list_jobs_of(namespace)
            except Exception as error:
                errors.append(error)
            finally:
                self._changed_meanwhile = None
        if errors:
            raise errors[0]

    async def _list_jobs_of(self, namespace: str | None) -> None:
        known = frozenset(name for name in self._router.known_names() if namespace in (None, name.namespace))
        found = set[Name]()

        def skipped(body: Json, _reason: Unreadable) -> None:
            with suppress(KeyError):
                found.add(name_of(body))
                self.job_unreadable(*name_of(body))

        async for body in self._deps.api.each("PseudoRealJob", namespace, skipped=skipped):
            found.add(name_of(body))
            if body["metadata"]["uid"] not in (self._changed_meanwhile or ()):
                self.job_changed(None, body)
            # Yield to the other tasks, such as the renewal of the Lease.
            await asyncio.sleep(0)
        self._router.queue_missing(found, known)
        for name in known - found:
            self._memory.forget_job(name)
        if not self._job_changes_missed.is_set():
            self._memory.jobs_listed(namespace)

    def job_changed(self, change: str | None, body: Json) -> None:
        try:
            if change is not None and self._changed_meanwhile is not None:
                self._changed_meanwhile.add(body["metadata"]["uid"])
            # The leader's passes forget jobs that have ended. A standby makes no passes, so it forgets them here.
            if change == "DELETED" or (not self._leads and summary_of(body).ended):
                self._deps.forget(body["metadata"]["namespace"], body["metadata"]["uid"])
            # The watch of jobs tells a part of each job, and a list the whole.
            self._memory.keep_job(body) if change is None else self._memory.job_changed(change, body)
            self._router.job_changed(change, body, datetime.now(UTC))
            self._job_metrics.job_changed(change, body)
        except Exception as error:  # the pass over the job reports the error
            metadata = body.get("metadata") or {}
            log.warning("job_unreadable", name=metadata.get("name"), error=repr(error))
            if "namespace" in metadata and "name" in metadata:
                self.job_unreadable(*name_of(body))

    def job_unreadable(self, namespace: str, name: str) -> None:
        """Queue a pass over a job that a watch or list cannot read; if the pass cannot read the job either, it reports
        this in the job's status, and no change causes a pass for UNREADABLE_SECONDS."""
        job = Name(namespace, name)
        self._memory.distrust(job)
        self._queue_pass(job, 0.0 if self._unreadable_limit.allows(job) else UNREADABLE_SECONDS)

    def _child_changed(self, kind: str, change: str, body: Json) -> None:
        """Pass a change to all receivers. An error in one receiver does not keep the change from the others."""
        receivers: list[Callable[[str, Json], None]] = [partial(self._router.child_changed, kind)]
        if kind == "Pod":
            receivers.append(self._store_termination_message)
            receivers += [self._identities.pod_changed] if self._identities else []
        for receive in receivers:
            try:
                receive(change, body)
            except Exception as error:  # anyone can put the operator's labels on a malformed object
                log.warning("child_unreadable", kind=kind, name=body["metadata"].get("name"), error=repr(error))

    def _child_changes_missed(self) -> None:
        self._router.child_changes_missed()
        if self._identities:
            self._identities.changes_missed()

    def _store_termination_message(self, change: str, pod: Json) -> None:
        """Keep the termination message of a deleted pod: a pass cannot read it any more."""
        uid = pod["metadata"]["labels"].get(LABEL_JOB_UID, "")
        if change == "DELETED" and belongs_to(uid, pod):
            self._deps.termination_messages.store((pod["metadata"]["namespace"], uid), read_pod(pod))

    async def _pass(self, name: Name) -> float | None:
        if idle := self._router.take_idle_job(name):
            return _within_resync(idle.wait)
        known = self._router.uids_of(name)
        with structlog.contextvars.bound_contextvars(job=f"{name.namespace}/{name.name}"):
            try:
                with PASS_SECONDS.time():
                    callbacks = Callbacks(
                        partial(self._queue.add, name),
                        self._router.status_written,
                        partial(self._delay_after_large_list, name),
                        partial(self._queue.block, name, UNREADABLE_SECONDS),
                    )
                    return _within_resync(await reconcile(self._deps, name, callbacks))
            except JobDeleted:
                self._job_metrics.forget(name)
                self._router.forget_deleted(name, known)  # no watch may ever tell of the deletion
                return None
            finally:
                self._forget_deleted(name, known)

    def _forget_deleted(self, name: Name, before: frozenset[str]) -> None:
        """Forget the jobs deleted during a pass. `before`: uids of the known jobs of this name at the start of the
        pass. The pass may have stored reports, sightings and the job itself after the watch reported the deletion."""
        present = self._router.uids_of(name)
        for uid in before - present:
            self._deps.forget(name.namespace, uid)
        if before and not present:
            self._memory.forget_job(name)

    def _delay_after_large_list(self, name: Name, children: int) -> None:
        """Delay the next pass over a job after a pass that has read more than _CHILDREN_AT_ONCE children, in proportion
        to the excess. Ten pods from memory count as one child."""
        if children > _CHILDREN_AT_ONCE:
            self._queue.block(name, (children - _CHILDREN_AT_ONCE) * _SECONDS_PER_CHILD)


def _within_resync(wait: float | None) -> float:
    """Return the wait in seconds, limited to RESYNC_SECONDS minus random jitter. The jitter keeps jobs from being
    resynced together."""
    most = RESYNC_SECONDS * (1 - random() / 4)
    return most if wait is None else min(wait, most)


def _log_failure(name: Name, error: Exception, failures: int) -> Backoff:
    PASS_ERRORS.labels(code=code_of(error)).inc()
    pause = backoff_after(error, failures, random())
    facts = {"job": f"{name.namespace}/{name.name}", "failures": failures, "retry_after": round(pause.seconds, 1)}
    if not isinstance(error, API_ERRORS):
        log.error("pass_failed", exc_info=error, **facts)
    elif not isinstance(error, ApiException):
        log.warning("pass_failed", error=f"{type(error).__name__}: {error}", **facts)
    elif error.status == CONFLICT and failures == 1:
        log.debug("pass_failed", status=error.status, error=message_of(error), **facts)
    else:
        log.warning("pass_failed", status=error.status, error=message_of(error), **facts)
    return pause


def code_of(error: Exception) -> str:
    """Return the metric label of a failed pass: the HTTP status, NO_ANSWER or internal."""
    if isinstance(error, ApiException):
        return str(error.status)
    return NO_ANSWER if isinstance(error, API_ERRORS) else "internal"


async def read_logs(api: Api, report_store: ReportStore) -> NoReturn:
    while True:
        await asyncio.sleep(PAUSE_SECONDS)
        try:
            now = datetime.now(UTC)
            report_store.notice_silence(now)
            _set_silence_metrics(report_store, now)
            if silent := report_store.most_silent(now):
                await _read_log(api, report_store, silent)
        except Exception as error:
            log.error("log_reader_failed", exc_info=error)


def _set_silence_metrics(report_store: ReportStore, now: datetime) -> None:
    jobs = report_store.silent_jobs(now)
    for is_silent in (False, True):
        count = sum(number for (_, silent), number in jobs.items() if silent is is_silent)
        REPORTING_JOBS.labels(heard=str(not is_silent).lower()).set(count)
    PATH_CUT.set(report_store.path_is_cut)


async def _read_log(api: Api, report_store: ReportStore, reporter: ReportingPod) -> None:
    """Read one log. If it shows steps, the report store queues the job again."""
    try:
        report = newest_report(await api.log_tail(reporter.job[0], reporter.pod, CONTAINER, LOG_LINES))
    except (ApiException, ClientError, OSError) as error:
        log.debug("log_request_failed", pod=reporter.pod, error=str(error))
        return
    if report is not None:
        report_store.read_log(reporter, report, datetime.now(UTC))

"""One reconcile pass over one job: observe, plan, carry out.

A pass begins with the memory of the watches. If its plan is routine, the pass carries the plan out, and has asked the
API server nothing. Otherwise it observes and plans again, with objects read from the API server.
"""

import asyncio
import socket
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from random import random
from typing import Any

import structlog
from kubernetes.aio.client import ApiException
from pseudoreal_api.base import API_VERSION, KIND
from pseudoreal_api.spec.job import JobMetadata
from pseudoreal_api.status.status import PseudoRealJobStatus
from pydantic import ValidationError

from pseudoreal_operator.cluster.api import Api, Name, message_of, status_of
from pseudoreal_operator.cluster.bounds import MOST_BYTES, Unreadable
from pseudoreal_operator.cluster.creation import NameConflict, NotServed, create_child, dry_run
from pseudoreal_operator.cluster.retry import API_ERRORS, backoff_after
from pseudoreal_operator.lifecycle.clocks import STOP_SECONDS
from pseudoreal_operator.lifecycle.plan import Plan, plan, plan_blocked, plan_conflict, plan_rejected, plan_unreadable
from pseudoreal_operator.lifecycle.routine import is_routine, rests_on_successes
from pseudoreal_operator.loop.event_recorder import EventRecorder
from pseudoreal_operator.loop.internal_error import (
    UnreadableJobs,
    report_internal_error,
    report_rejection,
    report_unreadable,
)
from pseudoreal_operator.loop.planning_thread import Overran, OverrunBackoff, PlanningThread, SpecCache
from pseudoreal_operator.metrics.registry import PLAN_OVERRUNS, OperatorCounters
from pseudoreal_operator.observe.fetch import Behind, Source, observe
from pseudoreal_operator.observe.memory import KINDS, Memory
from pseudoreal_operator.observe.report_store import JobKey, ReportStore
from pseudoreal_operator.observe.sightings import Sightings
from pseudoreal_operator.observe.stages import most_pods, phases_to_finish
from pseudoreal_operator.observe.termination_messages import TerminationMessages
from pseudoreal_operator.observe.view import Observed
from pseudoreal_operator.observe.worker_assignment import memberships
from pseudoreal_operator.settings import Settings
from pseudoreal_operator.status.conditions import has_ended, texts_of, without_figures, without_texts
from pseudoreal_operator.status.events import to_manifests
from pseudoreal_operator.untrusted_text import sanitize

Json = dict[str, Any]

_INVALID = (400, 422)
_FORBIDDEN = 403
_TOO_LARGE = 413
_SERVER_ERROR = 500
_ORDINARY_BYTES = 2**18
"""Maximum bytes of an ordinary job. Only few passes over larger jobs run at a time, because a pass keeps the job, and
copies of its parts, in memory until the end of the pass."""
_DELETIONS_AT_ONCE = 16
"""Maximum number of simultaneous deletions of pods, over all jobs. Deletions of 1,000 pods one after the other made the
next execution 13 s later."""
_LARGE_AT_ONCE = 2
"""Maximum number of simultaneous passes over larger jobs."""

log = structlog.get_logger()


class StatusRejected(ApiException):
    """The API server rejects a job's status, even without texts and figures."""

    def __init__(self, rejection: ApiException) -> None:
        super().__init__(status=rejection.status, reason=rejection.reason)
        self.body, self.headers = rejection.body, rejection.headers


class JobDeleted(Exception):
    """The job is deleted, or is being deleted; the garbage collector deletes its children."""


class NotRoutine(Exception):
    """The source does not suffice: the plan is not routine, or the memory is behind. `is_success`: the plan only
    records that stages were done."""

    def __init__(self, *, is_success: bool = False) -> None:
        super().__init__()
        self.is_success = is_success


@dataclass(frozen=True)
class Dependencies:
    """Dependencies that all passes share."""

    api: Api
    settings: Settings
    report_store: ReportStore
    counters: OperatorCounters
    event_recorder: EventRecorder
    termination_messages: TerminationMessages = field(default_factory=TerminationMessages)
    planning_thread: PlanningThread = field(default_factory=PlanningThread)
    spec_cache: SpecCache = field(default_factory=SpecCache)
    overrun_backoff: OverrunBackoff = field(default_factory=OverrunBackoff)
    sightings: Sightings = field(default_factory=Sightings)
    memory: Memory = field(default_factory=Memory)
    large_jobs: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_LARGE_AT_ONCE))
    """Held by passes over large jobs."""
    pod_deletions: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_DELETIONS_AT_ONCE))
    """Held during each deletion of a pod."""
    unreadable_jobs: UnreadableJobs = field(default_factory=UnreadableJobs)
    """Reports of unreadable jobs that were written to a status; each report is written once."""

    def forget(self, namespace: str, uid: str) -> None:
        """Drop the reports, termination messages, sightings, held events and backoff of a job. `spec_cache` and
        `unreadable_jobs` are bounded and drop old entries themselves."""
        self.report_store.forget((namespace, uid))
        self.termination_messages.forget((namespace, uid))
        self.sightings.forget((namespace, uid))
        self.event_recorder.forget(uid)
        self.overrun_backoff.forget(uid)


@dataclass(frozen=True)
class Callbacks:
    """Callbacks of a pass over a job."""

    requeue: Callable[[float], None]
    """Called with seconds: requests a pass after this delay. May be called at any time."""
    status_written: Callable[[Json], None]
    """Called with the job after a status write, so that the watch event of this write causes no pass."""
    children_listed: Callable[[int], None] = lambda _: None
    """Called with the number of listed children, where ten pods from memory count as one."""
    unreadable: Callable[[], None] = lambda: None
    """Called if the job itself cannot be read, once its status says so."""


async def reconcile(deps: Dependencies, name: Name, callbacks: Callbacks) -> float | None:
    """Make a pass over a job. Return the seconds until the next pass is due; None: wait for a change.

    Raises JobDeleted. Raises an error of API_ERRORS if the API server rejects a request (a conflict included), does
    not answer, or cannot be reached; another pass then continues. Any other error is a bug of the operator, which the
    job's status reports.
    """
    try:
        return await _reconcile(deps, name, callbacks)
    except JobDeleted:
        deps.memory.forget_job(name)
        raise
    except Exception:
        deps.memory.distrust(name)  # a write may or may not have been stored
        raise


async def _reconcile(deps: Dependencies, name: Name, callbacks: Callbacks) -> float | None:
    is_success = False
    body = deps.memory.job(name)
    if body is not None and "deletionTimestamp" not in body["metadata"]:
        try:
            return await _reconcile_and_report_errors(deps, body, callbacks, Source.MEMORY)
        except NotRoutine as found:
            is_success = found.is_success
    if not is_success:
        deps.memory.trust(name)  # before everything is read: a reason for distrust that comes meanwhile stays
    async with AsyncExitStack() as stack:
        try:
            body = await _read_job(deps, name, stack)
        except Unreadable as reason:
            deps.memory.distrust(name)
            await report_unreadable(deps.api, name, reason, deps.unreadable_jobs)
            callbacks.unreadable()
            return None
        if "deletionTimestamp" in body["metadata"]:
            raise JobDeleted
        deps.memory.keep_job(body)
        if is_success:
            with suppress(NotRoutine):
                return await _reconcile_and_report_errors(deps, body, callbacks, Source.MEMORY_OF_PODS)
        return await _reconcile_and_report_errors(deps, body, callbacks, Source.API_SERVER)


async def _read_job(deps: Dependencies, name: Name, stack: AsyncExitStack) -> Json:
    """Return the job. For a large job, acquire `large_jobs` first; closing `stack` releases it. Raises JobDeleted or
    Unreadable."""
    try:
        return await _read(deps.api, name, _ORDINARY_BYTES)
    except Unreadable:
        await stack.enter_async_context(deps.large_jobs)
        return await _read(deps.api, name, MOST_BYTES)


async def _read(api: Api, name: Name, most: int) -> Json:
    """Return the job as the API server has it. Raises JobDeleted or Unreadable. A list must confirm that the job is
    gone: a single answer of 404 may have other reasons, such as a CRD that is being replaced."""
    found = await api.find_within(most, "PseudoRealJob", *name)
    if found is not None:
        return found
    if await api.is_listed("PseudoRealJob", *name):
        raise ApiException(status=404, reason="The job was not found, and it is there")
    raise JobDeleted


async def _reconcile_and_report_errors(
    deps: Dependencies, body: Json, callbacks: Callbacks, source: Source
) -> float | None:
    uid, generation = body["metadata"]["uid"], body["metadata"].get("generation", 0)
    if (wait := deps.overrun_backoff.remaining(uid, generation)) is not None:
        return wait
    try:
        return await _reconcile_existing(deps, body, callbacks, source)
    except NotRoutine:
        raise
    except StatusRejected as rejection:
        await report_rejection(deps.api, body, rejection)
        raise
    except API_ERRORS:
        raise
    except Overran as error:
        PLAN_OVERRUNS.inc()
        wait = deps.overrun_backoff.record(uid, generation)
        log.error("plan_overran", error=str(error), generation=generation, left_alone_seconds=wait)
        await report_internal_error(deps.api, body, error)
        return wait
    except Unreadable as reason:
        await report_internal_error(deps.api, body, reason)
        return None
    except Exception as error:
        if source is not Source.API_SERVER:
            # The memory of Jobs and of pods may never have been true at the same time, so the error says nothing yet.
            log.warning("plan_from_memory_failed", exc_info=error)
            raise NotRoutine from error
        deps.counters.internal_errors += 1
        await report_internal_error(deps.api, body, error)
        raise


async def _reconcile_existing(deps: Dependencies, body: Json, callbacks: Callbacks, source: Source) -> float | None:
    """Observe, plan and act once. Return the seconds until the next pass; None: wait for a change. Raises NotRoutine if
    `source` does not suffice for the plan."""
    now = datetime.now(UTC)
    run = deps.planning_thread.run
    metadata = JobMetadata.model_validate(body["metadata"])
    status = await run(PseudoRealJobStatus.model_validate, body.get("status") or {})
    executor = _PlanExecutor(deps, metadata, status, body["metadata"]["resourceVersion"], callbacks.status_written)
    # 1. Post the events of an earlier status write that got no answer, if its status turns out to be stored.
    deps.event_recorder.post(executor.name, deps.event_recorder.take_held(metadata.uid, status))
    # 2. Parse the spec. A spec that this release cannot read blocks the job without failing it: another release may be
    #    about to take over.
    try:
        job = await run(deps.spec_cache.parse, body)
    except ValidationError as error:
        if source is Source.MEMORY:
            raise NotRoutine from None
        sentence = f"This release of the operator cannot read the job: {sanitize(str(error))}"
        return await executor.apply_without_children(plan_unreadable(metadata, status, sentence, now))
    if not job.spec.is_managed_here:
        return None  # spec.managedBy names another controller
    # 3. Follow the pods' reports; for an ended job, forget its reports, termination messages, sightings and events.
    if has_ended(status):
        deps.forget(*executor.key)
    else:
        pods, phases = most_pods(job.spec), phases_to_finish(job.spec, status)
        deps.report_store.follow(executor.key, pods, phases, callbacks.requeue, memberships(status))
    # 4. Observe: read the children, and add the reports, termination messages and sightings of their pods.
    try:
        observed = await observe(
            deps.api,
            deps.report_store,
            deps.termination_messages,
            deps.sightings,
            job,
            status,
            now,
            callbacks.children_listed,
            deps.memory,
            source,
        )
    except Behind:
        raise NotRoutine from None
    return await _plan_and_act(executor, observed, now, source)


async def _plan_and_act(executor: "_PlanExecutor", observed: Observed, now: datetime, source: Source) -> float | None:
    run, settings = executor.deps.planning_thread.run, executor.deps.settings
    # 5. Plan: a pure function of the observation.
    wanted = await run(plan, observed, now, settings)
    if source is Source.MEMORY and not is_routine(wanted, observed.status):
        raise NotRoutine(is_success=rests_on_successes(wanted, observed.status))
    if source is Source.MEMORY_OF_PODS and not rests_on_successes(wanted, observed.status):
        raise NotRoutine
    if wanted.expire:
        await executor.expire()
        return None
    # 6. Children before the status: if the operator dies in between, the next pass finds the children and completes the
    #    status. The number of another execution and the end of the job are stored first: the plan that announces them
    #    creates and deletes no Job; a later pass does.
    try:
        rejection = await executor.apply_children(wanted)
    except NameConflict as conflict:
        return await executor.apply_without_children(await run(plan_conflict, observed, str(conflict), now))
    except NotServed as missing:
        return await executor.apply_without_children(await run(plan_blocked, observed, str(missing), now))
    if rejection is not None:
        wait = await executor.apply_without_children(await run(_plan_after_rejection, rejection, observed, now))
        return _with_jitter(wait, rejection) if wait else wait
    # 7. The status, and after it the events that announce its transitions.
    executor = await executor.write_status(wanted)
    # 8. If the job was just accepted or has just ended, only its status changed: all other observations still hold, and
    #    are not read again.
    afterwards = replace(observed, status=executor.status)
    if has_ended(executor.status) and not has_ended(observed.status):
        return _delay_of_ended_job(executor, await run(plan, afterwards, now, settings))
    if not observed.status.phases and executor.status.phases:
        return await _plan_and_act(executor, afterwards, now, source)
    return wanted.requeue_after


def _delay_of_ended_job(executor: "_PlanExecutor", afterwards: Plan) -> float | None:
    """Return the seconds until the next pass over a job that has just ended: 0 if anything is left to do; None: wait
    for a change."""
    if afterwards != Plan(executor.status, requeue_after=afterwards.requeue_after):
        return 0.0
    executor.deps.forget(*executor.key)
    return afterwards.requeue_after


def _with_jitter(wait: float, rejection: ApiException) -> float:
    """Return the wait with random jitter, so that jobs held up by one quota do not retry together, and at least the
    Retry-After of the API server."""
    pause = backoff_after(rejection, 1, random())
    return max(wait * (1 - random() / 4), pause.seconds if pause.is_retry_after else 0.0)


def _plan_after_rejection(rejection: ApiException, observed: Observed, now: datetime) -> Plan:
    """Return the plan that follows when the API server rejects a child. Raises the rejection if the pass is to be
    retried."""
    text = f"The API server refuses a change of this job's children: {message_of(rejection)}"
    if is_invalid_object(rejection):
        return plan_rejected(observed, text, now)
    if rejection.status in (*_INVALID, _FORBIDDEN) or rejection.status >= _SERVER_ERROR:
        return plan_blocked(observed, text, now)
    raise rejection


def is_invalid_object(rejection: ApiException) -> bool:
    """Return whether the object itself is invalid. Policies answer with the same codes, but only the API server's own
    validation names fields as causes. A webhook cannot imitate it, because the API server adds a prefix to the message
    of a webhook."""
    answer = status_of(rejection)
    if rejection.status not in _INVALID or str(answer.get("message", "")).startswith("admission webhook "):
        return False
    causes = (answer.get("details") or {}).get("causes") or []
    return rejection.status == 400 or any(cause.get("field") for cause in causes)


def _is_final_rejection(error: ApiException) -> bool:
    """Return whether the API server would reject the same status again."""
    is_large = error.status >= _SERVER_ERROR and "too large" in message_of(error)
    return error.status in (*_INVALID, _FORBIDDEN, _TOO_LARGE) or is_large


@dataclass(frozen=True)
class _PlanExecutor:
    """Executor of the plan for one job. `status` and `version`: status and resource version of the object that the plan
    was made for. `status_written` receives the job after each status write."""

    deps: Dependencies
    metadata: JobMetadata
    status: PseudoRealJobStatus
    version: str
    status_written: Callable[[Json], None]

    @property
    def api(self) -> Api:
        return self.deps.api

    @property
    def name(self) -> Name:
        return Name(self.metadata.namespace, self.metadata.name)

    @property
    def key(self) -> JobKey:
        return self.metadata.namespace, self.metadata.uid

    async def expire(self) -> None:
        await self.api.delete("PseudoRealJob", self.metadata.namespace, self.metadata.name, self.metadata.uid)
        log.info("job_expired", completion_time=self.status.completion_time)

    async def apply_children(self, wanted: Plan) -> ApiException | None:
        """Apply a plan's changes of children, after its dry run. Return the API server's rejection, or None."""
        try:
            # Make the dry run before every effect: if a later stage is rejected, nothing has been changed yet.
            await dry_run(self.api, wanted.dry_run)
            # Stop and delete before the creation: a rejected creation (by a quota, for instance) must not keep pods
            # from being stopped, and pods that end make room. Names do not depend on this order. Only Jobs and pods are
            # deleted here. A Job's name contains the stage and the number of its execution, and its pods' names begin
            # with the Job's name. A new execution of a stage has a higher number than every existing child
            # (`View.status`).
            await self._stop_and_delete(wanted)
            for manifest in wanted.apply:
                created = await create_child(self.api, manifest)
                if manifest["kind"] in KINDS:
                    self.deps.memory.wrote(manifest["kind"], self.name, created)
        except ApiException as rejection:
            return rejection
        return None

    async def apply_without_children(self, wanted: Plan) -> float | None:
        """Apply a plan that creates no children; return the seconds until the next pass (None: wait for a change)."""
        await self._stop_and_delete(wanted)
        await self.write_status(wanted)
        return wanted.requeue_after

    async def write_status(self, wanted: Plan) -> "_PlanExecutor":
        """Write the status of a plan and post its events; return the executor that has the written status."""
        now, instance = datetime.now(UTC), socket.gethostname()
        events = to_manifests(wanted.events, self.metadata, now, instance)
        after = self
        if wanted.status != self.status:
            try:
                after = await self._write_accepted_form(wanted.status)
            except API_ERRORS:
                # If the API server did not answer, it may have stored the status nevertheless. (After a conflict, 409,
                # it has not.) The next pass compares the stored status with this one, and posts the events only if the
                # two are equal.
                self.deps.event_recorder.hold(self.metadata.uid, wanted.status, events)
                raise
        # Post the events after the status that records their transition: if the write fails, the next pass decides the
        # transition again and makes the same events; events posted before the write would announce a transition that
        # may never be stored. Nothing waits for the events.
        self.deps.event_recorder.post(self.name, events)
        return after

    async def _stop_and_delete(self, wanted: Plan) -> None:
        namespace = self.metadata.namespace
        stopped = set[str]()
        names, errors = iter(wanted.stop), list[Exception]()

        async def stop_next() -> None:
            """Stop one pod after the other, until none is left or one could not be stopped."""
            for name in names:
                try:
                    async with self.deps.pod_deletions:
                        await self.api.delete("Pod", namespace, name, grace_seconds=STOP_SECONDS)
                except Exception as error:
                    errors.append(error)
                    return
                stopped.add(name)
                log.info("pod_stopped", pod=name, grace_seconds=STOP_SECONDS)
                if errors:
                    return  # the next pass stops the rest

        try:
            await asyncio.gather(*(stop_next() for _ in range(_DELETIONS_AT_ONCE)))
        finally:
            # Once for all pods, because the memory looks through all pods of the job.
            self.deps.memory.deleted("Pod", self.name, stopped)
        if errors:
            raise errors[0]
        for name in wanted.fail_jobs:
            # maxFailedIndexes 0 makes the Job controller fail the whole Job at its first failed index.
            failed = await self.api.merge("Job", namespace, name, {"spec": {"maxFailedIndexes": 0}})
            self.deps.memory.wrote("Job", self.name, failed)
            log.info("job_failure_forced", name=name)
        for name in wanted.delete:
            await self.api.delete("Job", namespace, name)
            self.deps.memory.deleted("Job", self.name, {name})
            log.info("child_deleted", kind="Job", name=name)

    async def _write_accepted_form(self, status: PseudoRealJobStatus) -> "_PlanExecutor":
        """Write the status; return the executor that has the written status. A rejected status is written without
        its texts, and then without figures, so that no untrusted text stops a job. Raises StatusRejected if all forms
        are rejected."""
        try:
            return await self._apply_status(status)
        except ApiException as error:
            if not _is_final_rejection(error):
                raise
            rejection = error
        tried = status
        for reduced in (without_texts(status), without_figures(status)):
            if reduced == tried:
                continue
            tried = reduced
            self.deps.counters.refused_statuses += 1
            count, message = self.deps.counters.refused_statuses, message_of(rejection)
            log.error("status_refused", status=rejection.status, error=message, texts=texts_of(status), count=count)
            if reduced == self.status:
                return self
            try:
                return await self._apply_status(reduced)
            except ApiException as error:
                if not _is_final_rejection(error):
                    raise
                rejection = error
        raise StatusRejected(rejection)

    async def _apply_status(self, status: PseudoRealJobStatus) -> "_PlanExecutor":
        # With resourceVersion, the write conflicts if the job was changed after it was read, or if another job has its
        # name: the API server does not compare uids when it writes a status.
        name, namespace = self.metadata.name, self.metadata.namespace
        metadata = {"name": name, "namespace": namespace, "resourceVersion": self.version}
        manifest = {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "status": status.to_dict()}
        body = await self.api.apply(manifest, "status")
        self.deps.memory.keep_job(body, is_write=True)
        self.status_written(body)
        return replace(self, status=status, version=body["metadata"]["resourceVersion"])

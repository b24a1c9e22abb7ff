"""One reconcile pass over one job: observe, plan, carry out."""

import asyncio
import socket
from collections.abc import Callable
from contextlib import AsyncExitStack
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
from pseudoreal_operator.cluster.creation import NameConflict, NotServed, make
from pseudoreal_operator.cluster.finalizer import has_finalizer, take_off
from pseudoreal_operator.cluster.retry import UNAVAILABLE, pause_after
from pseudoreal_operator.foreign import clean
from pseudoreal_operator.lifecycle.plan import Plan, plan, plan_blocked, plan_conflict, plan_rejected, plan_unreadable
from pseudoreal_operator.lifecycle.stopping import STOP_SECONDS
from pseudoreal_operator.loop.computing import Computer, LeftAlone, Overran
from pseudoreal_operator.loop.counts import Counts
from pseudoreal_operator.loop.dry_run import dry_run
from pseudoreal_operator.loop.event_recorder import EventRecorder
from pseudoreal_operator.loop.internal_error import (
    UnreadableJobs,
    report_internal_error,
    report_rejection,
    report_unreadable,
)
from pseudoreal_operator.loop.specs import Specs
from pseudoreal_operator.metrics.registry import PLAN_OVERRUNS
from pseudoreal_operator.observe.fetch import observe
from pseudoreal_operator.observe.report_store import JobKey, ReportStore
from pseudoreal_operator.observe.sightings import Sightings
from pseudoreal_operator.observe.stages import phases_to_finish
from pseudoreal_operator.observe.termination_messages import TerminationMessages
from pseudoreal_operator.observe.view import Observed
from pseudoreal_operator.observe.worker_assignment import memberships
from pseudoreal_operator.settings import Settings
from pseudoreal_operator.status.conditions import has_ended, texts_of, without_figures, without_texts
from pseudoreal_operator.status.events import to_manifests

Json = dict[str, Any]

_INVALID = (400, 422)
_FORBIDDEN = 403
_TOO_LARGE = 413
_SERVER_ERROR = 500
_ORDINARY_BYTES = 2**18
"""Size of a job in bytes up to which the number of simultaneous passes is not limited: a pass keeps the job, and
copies of parts of it, until it ends."""
_LARGE_AT_ONCE = 2
"""Maximum number of simultaneous passes over larger jobs."""

log = structlog.get_logger()


class StatusRefused(ApiException):
    """The API server rejects every form of a job's status."""

    def __init__(self, refusal: ApiException) -> None:
        super().__init__(status=refusal.status, reason=refusal.reason)
        self.body, self.headers = refusal.body, refusal.headers


class JobDeleted(Exception):
    """The job is deleted, or is being deleted; the garbage collector deletes its children."""


@dataclass(frozen=True)
class Dependencies:
    """Dependencies that all passes share."""

    api: Api
    settings: Settings
    report_store: ReportStore
    counts: Counts
    event_recorder: EventRecorder
    termination_messages: TerminationMessages = field(default_factory=TerminationMessages)
    computer: Computer = field(default_factory=Computer)
    specs: Specs = field(default_factory=Specs)
    left_alone: LeftAlone = field(default_factory=LeftAlone)
    sightings: Sightings = field(default_factory=Sightings)
    large: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_LARGE_AT_ONCE))
    """Held by passes over large jobs."""
    unreadable: UnreadableJobs = field(default_factory=UnreadableJobs)
    """Jobs whose status reports that they cannot be read."""

    def forget(self, namespace: str, uid: str) -> None:
        """Drop everything that memory holds about a job."""
        self.report_store.forget((namespace, uid))
        self.termination_messages.forget((namespace, uid))
        self.sightings.forget((namespace, uid))
        self.event_recorder.forget(uid)
        self.left_alone.forget(uid)


@dataclass(frozen=True)
class Callbacks:
    """Callbacks of a pass over a job."""

    requeue: Callable[[float], None]
    """Requests a pass in so many seconds; may be called at any time."""
    status_written: Callable[[Json], None]
    """Receives the job after a status write, so that the watch event of this write causes no pass."""
    listed: Callable[[int], None] = lambda _: None
    """Receives the number of children that were listed."""


async def reconcile(deps: Dependencies, name: Name, callbacks: Callbacks) -> float | None:
    """Make a pass over a job. Return the seconds until the next pass is due; None: wait for a change.

    Raises JobDeleted. Raises an error of UNAVAILABLE if the API server fails; another pass then continues. Any other
    error is a bug of the operator, which the job's status reports.
    """
    async with AsyncExitStack() as stack:
        try:
            body = await _read_in_turn(deps, name, stack)
        except Unreadable as reason:
            await report_unreadable(deps.api, name, reason, deps.unreadable)
            return None
        return await _reconcile(deps, body, callbacks)


async def _reconcile(deps: Dependencies, body: Json, callbacks: Callbacks) -> float | None:
    if has_finalizer(body["metadata"]):
        await take_off(deps.api, body["metadata"])
        return 0.0
    if "deletionTimestamp" in body["metadata"]:
        raise JobDeleted
    uid, generation = body["metadata"]["uid"], body["metadata"].get("generation", 0)
    if (wait := deps.left_alone.wait(uid, generation)) is not None:
        return wait
    try:
        return await _pass(deps, body, callbacks)
    except StatusRefused as refusal:
        await report_rejection(deps.api, body, refusal)
        raise
    except UNAVAILABLE:
        raise
    except Overran as error:
        PLAN_OVERRUNS.inc()
        wait = deps.left_alone.note(uid, generation)
        log.error("plan_overran", error=str(error), generation=generation, left_alone_seconds=wait)
        await report_internal_error(deps.api, body, error)
        return wait
    except Unreadable as reason:
        await report_internal_error(deps.api, body, reason)
        return None
    except Exception as error:
        deps.counts.internal_errors += 1
        await report_internal_error(deps.api, body, error)
        raise


async def _read_in_turn(deps: Dependencies, name: Name, stack: AsyncExitStack) -> Json:
    """Return the job. A pass over a large job waits for its turn, which lasts until `stack` is closed. Raises
    JobDeleted or Unreadable."""
    try:
        return await _read(deps.api, name, _ORDINARY_BYTES)
    except Unreadable:
        await stack.enter_async_context(deps.large)
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


async def _pass(deps: Dependencies, body: Json, callbacks: Callbacks) -> float | None:
    now = datetime.now(UTC)
    run = deps.computer.run
    metadata = JobMetadata.model_validate(body["metadata"])
    status = await run(PseudoRealJobStatus.model_validate, body.get("status") or {})
    executor = _PlanExecutor(deps, metadata, status, body["metadata"]["resourceVersion"], callbacks.status_written)
    # Events of an earlier status write that got no answer: post them if its status turns out to be stored.
    deps.event_recorder.post(executor.name, deps.event_recorder.take_held(metadata.uid, status))
    try:
        job = await run(deps.specs.job, body)
    except ValidationError as error:
        sentence = f"This release of the operator cannot read the job: {clean(str(error))}"
        return await executor.apply_without_children(plan_unreadable(metadata, status, sentence, now))
    if not job.spec.is_managed_here:
        return None
    if has_ended(status):
        deps.forget(*executor.key)
    else:
        deps.report_store.follow(
            executor.key, phases_to_finish(job.spec, status), callbacks.requeue, memberships(status)
        )
    observed = await observe(
        deps.api, deps.report_store, deps.termination_messages, deps.sightings, job, status, now, callbacks.listed
    )
    return await _act(executor, observed, now)


async def _act(executor: "_PlanExecutor", observed: Observed, now: datetime) -> float | None:
    run, settings = executor.deps.computer.run, executor.deps.settings
    wanted = await run(plan, observed, now, settings)
    if wanted.expire:
        await executor.expire()
        return None
    try:
        # Children before the status: if the operator dies in between, the next pass finds them and completes the
        # status.
        refusal = await executor.apply_children(wanted)
    except NameConflict as conflict:
        return await executor.apply_without_children(await run(plan_conflict, observed, str(conflict), now))
    except NotServed as missing:
        return await executor.apply_without_children(await run(plan_blocked, observed, str(missing), now))
    if refusal is None:
        return await _go_on(await executor.write_status(wanted), observed, wanted, now)
    wait = await executor.apply_without_children(await run(_answer_to, refusal, observed, now))
    return _spread(wait, refusal) if wait else wait


async def _go_on(executor: "_PlanExecutor", observed: Observed, done: Plan, now: datetime) -> float | None:
    """Continue after a plan was carried out; return the seconds until the next pass. If the job was just accepted or
    has just ended, only its status was written: all other observations still hold and are not read again."""
    then = replace(observed, status=executor.status)
    if has_ended(executor.status) and not has_ended(observed.status):
        return _at_the_end(executor, await executor.deps.computer.run(plan, then, now, executor.deps.settings))
    if not observed.status.phases and executor.status.phases:
        return await _act(executor, then, now)
    return done.requeue_after


def _at_the_end(executor: "_PlanExecutor", afterwards: Plan) -> float | None:
    """Return the seconds until the next pass over a job that has just ended: 0 if anything is left to do."""
    if afterwards != Plan(executor.status, requeue_after=afterwards.requeue_after):
        return 0.0
    executor.deps.forget(*executor.key)
    return afterwards.requeue_after


def _spread(wait: float, refusal: ApiException) -> float:
    """Return the wait with random jitter, so that jobs held up by one quota do not retry together, and at least the
    Retry-After of the API server."""
    pause = pause_after(refusal, 1, random())
    return max(wait * (1 - random() / 4), pause.seconds if pause.binding else 0.0)


def _answer_to(refusal: ApiException, observed: Observed, now: datetime) -> Plan:
    """Return the plan that follows when the API server rejects a child. Raises the rejection if a retry of the pass
    is the answer."""
    text = f"The API server refuses a change of this job's children: {message_of(refusal)}"
    if is_invalid_object(refusal):
        return plan_rejected(observed, text, now)
    if refusal.status in (*_INVALID, _FORBIDDEN) or refusal.status >= _SERVER_ERROR:
        return plan_blocked(observed, text, now)
    raise refusal


def is_invalid_object(refusal: ApiException) -> bool:
    """Return whether the object itself is invalid. Policies answer with the same codes, but only the API server's
    own validation names fields as causes. The API server prefixes a webhook's message, whatever the webhook puts
    into it."""
    said = status_of(refusal)
    if refusal.status not in _INVALID or str(said.get("message", "")).startswith("admission webhook "):
        return False
    causes = (said.get("details") or {}).get("causes") or []
    return refusal.status == 400 or any(cause.get("field") for cause in causes)


def _is_refusal(error: ApiException) -> bool:
    """Return whether the API server would reject the same status again."""
    is_large = error.status >= _SERVER_ERROR and "too large" in message_of(error)
    return error.status in (*_INVALID, _FORBIDDEN, _TOO_LARGE) or is_large


@dataclass(frozen=True)
class _PlanExecutor:
    """Plan executor for one job. `status` and `version` are those of the object that the plan was made for. `wrote`
    receives the job after each status write."""

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
        log.info("expired", completed=self.status.completion_time)

    async def apply_children(self, wanted: Plan) -> ApiException | None:
        """Apply a plan's changes of children, after its dry run. Return the API server's rejection, or None."""
        try:
            await dry_run(self.api, wanted.dry_run)
            await self._remove(wanted)
            for manifest in wanted.apply:
                await make(self.api, manifest)
        except ApiException as refusal:
            return refusal
        return None

    async def apply_without_children(self, wanted: Plan) -> float | None:
        """Apply a plan that creates no children; return the seconds until the next pass."""
        await self._remove(wanted)
        await self.write_status(wanted)
        return wanted.requeue_after

    async def write_status(self, wanted: Plan) -> "_PlanExecutor":
        """Write the status of a plan and post its events; return the executor that has the written status. Events
        come after the status that records their transition, and nothing waits for them."""
        now, instance = datetime.now(UTC), socket.gethostname()
        events = to_manifests(wanted.events, self.metadata, now, instance)
        after = self
        if wanted.status != self.status:
            try:
                after = await self._write(wanted.status)
            except UNAVAILABLE:
                # The API server may have stored the status nevertheless; the next pass finds out, and then posts the
                # events.
                self.deps.event_recorder.hold(self.metadata.uid, wanted.status, events)
                raise
        self.deps.event_recorder.post(self.name, events)
        return after

    async def _remove(self, wanted: Plan) -> None:
        namespace = self.metadata.namespace
        for name in wanted.stop:
            await self.api.delete("Pod", namespace, name, grace_seconds=STOP_SECONDS)
            log.info("stopped", pod=name, seconds=STOP_SECONDS)
        for name in wanted.fail_jobs:
            # maxFailedIndexes 0 makes the Job controller fail the whole Job at its first failed index.
            await self.api.merge("Job", namespace, name, {"spec": {"maxFailedIndexes": 0}})
            log.info("given_up", kind="Job", name=name)
        for name in wanted.delete:
            await self.api.delete("Job", namespace, name)
            log.info("deleted", kind="Job", name=name)

    async def _write(self, status: PseudoRealJobStatus) -> "_PlanExecutor":
        """Write the status; return the executor that has the written status. A rejected status is written without
        its texts, and then without figures, so that no foreign text stops a job. Raises StatusRefused if that is
        rejected too."""
        try:
            return await self._apply(status)
        except ApiException as error:
            if not _is_refusal(error):
                raise
            refusal = error
        tried = status
        for less in (without_texts(status), without_figures(status)):
            if less == tried:
                continue
            tried = less
            self.deps.counts.refused_statuses += 1
            count, said = self.deps.counts.refused_statuses, message_of(refusal)
            log.error("status_refused", status=refusal.status, error=said, texts=texts_of(status), count=count)
            if less == self.status:
                return self
            try:
                return await self._apply(less)
            except ApiException as error:
                if not _is_refusal(error):
                    raise
                refusal = error
        raise StatusRefused(refusal)

    async def _apply(self, status: PseudoRealJobStatus) -> "_PlanExecutor":
        # With resourceVersion, a job that was changed after it was read gives a conflict, and so does another job of
        # that name: the API server writes a status without comparing uids.
        name, namespace = self.metadata.name, self.metadata.namespace
        metadata = {"name": name, "namespace": namespace, "resourceVersion": self.version}
        manifest = {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "status": status.to_dict()}
        body = await self.api.apply(manifest, "status")
        self.status_written(body)
        return replace(self, status=status, version=body["metadata"]["resourceVersion"])

"""Reads a job, its Jobs, pods and claims for one pass: from the memory of the watches, or from the API server."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from enum import StrEnum
from functools import partial
from typing import Any

from kubernetes.aio.client import ApiException
from pseudoreal_api.names import LABEL_JOB, claim_name
from pseudoreal_api.spec.job import PseudoRealJob
from pseudoreal_api.status.status import PseudoRealJobStatus

from pseudoreal_operator.cluster.api import Api, Name
from pseudoreal_operator.cluster.bounds import Unreadable
from pseudoreal_operator.observe.claims import Claim, ClaimPhase, mounted_claims, newest_warning, own_claims, read_claim
from pseudoreal_operator.observe.memory import POD_JOB, Children, Memory, version_of, version_of_object
from pseudoreal_operator.observe.reading import (
    belongs_to,
    has_no_pod_left,
    is_of_another,
    is_orphan,
    read_job,
    read_pod,
)
from pseudoreal_operator.observe.report_store import ReportingPod, ReportStore
from pseudoreal_operator.observe.sightings import Sightings
from pseudoreal_operator.observe.stages import Execution, Stage, StageKind, current_stage, with_added_phases
from pseudoreal_operator.observe.termination_messages import TerminationMessages
from pseudoreal_operator.observe.view import NO_PODS, ChildJob, Observed, Pod, PodPhase, Pods
from pseudoreal_operator.observe.worker_assignment import memberships, with_worker_indices

Json = dict[str, Any]

_CLAIM = "PersistentVolumeClaim"
_FORBIDDEN = 403
MEMORY_BEHIND = timedelta(seconds=120)
"""Maximum delay of the memory: an event reaches its watch at once, and a watch counts as cut after 90 seconds of
silence. If only a pass from memory bounds a reported time from below, the bound is earlier by this delay, except for
deletion deadlines."""
_MEMORY_FACTOR = 10
"""Number of pods from memory counted as one pod from the API server: pods from memory are neither requested nor
parsed."""
_EVENTS = 50
"""Maximum number of events that are read of a claim."""


class Source(StrEnum):
    """Where a pass reads the children from."""

    MEMORY = "memory"
    MEMORY_OF_PODS = "Jobs from the API server, pods from memory"
    API_SERVER = "API server"


class Behind(Exception):
    """The memory is known to be behind for this job."""


async def observe(
    api: Api,
    report_store: ReportStore,
    termination_messages: TerminationMessages,
    sightings: Sightings,
    job: PseudoRealJob,
    status: PseudoRealJobStatus,
    now: datetime,
    listed: Callable[[int], None] = lambda _: None,
    memory: Memory | None = None,
    source: Source = Source.API_SERVER,
) -> Observed:
    """Return the observation of a job: its children, claims and reports. `listed` is called with the number of objects
    read from the API server, plus a tenth of the pods from memory. Raises Unreadable for a child or claim beyond the
    bounds; other objects beyond the bounds are skipped, whatever their labels. Raises Behind."""
    namespace, uid = job.metadata.namespace, job.metadata.uid
    memory = memory or Memory()
    found = _Found(uid)
    # Read Jobs before pods: the pods of an ended Job are then read after its end, and show the outcome.
    if source is Source.MEMORY:
        found.take_jobs(_remembered(memory, "Job", job))
    else:
        await found.list_jobs(api, memory, job)
    present = current_execution(job, status, found.jobs)
    finished = frozenset(one.name for one in found.finished if one.execution != present)
    if source is Source.API_SERVER:
        await found.list_pods(api, memory, job, finished)
    else:
        found.take_pods(_remembered(memory, "Pod", job), finished)
    jobs, pods, others = found.jobs, found.pods, found.of_deleted_job
    # The plan looks at each pod, from memory too.
    listed(found.count if source is Source.API_SERVER else found.count + len(found.pods) // _MEMORY_FACTOR)
    behind = timedelta(0) if source is Source.API_SERVER else MEMORY_BEHIND
    report_store.forget_other_executions((namespace, uid), _executions_heard(job, status, jobs, pods))
    last_reports = partial(report_store.of_job, (namespace, uid))
    jobs, pods = sightings.with_bounded_times((namespace, uid), status, jobs, pods, now, behind, last_reports)
    existing: set[tuple[str, str]] = set()
    claims: list[Claim] = []
    waiting = _unplaced_pod(job, status, jobs, pods)
    # Claims are not watched. Before children are created, the pass reads everything from the API server.
    is_first_look = source is Source.MEMORY and not has_claim(job, status, jobs)
    for claim in () if is_first_look else _claims_to_read(job, status, jobs, waiting):
        stored = await api.find(_CLAIM, namespace, claim.name)
        if stored is None:
            claims.append(claim)
        elif claim.name == claim_of(job) and is_of_another(uid, stored):
            others.append(claim.name)
        else:
            existing.add((_CLAIM, claim.name))
            read = read_claim(claim, stored)
            pending = waiting is not None and read.phase is ClaimPhase.PENDING
            claims.append(await _with_complaint(api, namespace, read, stored["metadata"]["uid"]) if pending else read)
    deleted_pods = termination_messages.of_job((namespace, uid), pods.names)
    observed = build_observed(report_store, job, status, jobs, pods, now, deleted_pods)
    return replace(
        observed,
        existing=observed.existing | existing,
        objects_of_deleted_job=tuple(others),
        orphans=tuple(found.orphans),
        claims=tuple(claims),
    )


def job_name(job: PseudoRealJob) -> Name:
    return Name(job.metadata.namespace, job.metadata.name)


def _selector(job: PseudoRealJob) -> str:
    return f"{LABEL_JOB}={job.metadata.name}"


def _remembered(memory: Memory, kind: str, job: PseudoRealJob) -> Children:
    """Return the children of the job as the watches have told. Raises Behind."""
    name = job_name(job)
    known = memory.children(name, job.metadata.uid) if memory.is_current(kind, name) else None
    if known is None:
        raise Behind
    return known


def _unplaced_pod(job: PseudoRealJob, status: PseudoRealJobStatus, jobs: Sequence[ChildJob], pods: Pods) -> str | None:
    """Return the name of a pod of the present execution that waits for a node; None if there is none."""
    execution = current_execution(job, status, jobs)
    waiting = pods.of(execution).without_node if execution else ()
    return next((pod.name for pod in waiting if pod.phase is PodPhase.PENDING), None)


def _claims_to_read(
    job: PseudoRealJob, status: PseudoRealJobStatus, jobs: Sequence[ChildJob], waiting: str | None
) -> list[Claim]:
    """Return the claims that matter now: before the Job of an execution is created, those that decide whether its pods
    stay on one node; while the pod `waiting` has no node, also those made for that pod."""
    first = Stage(0, job.spec.phases[0].name, StageKind.TRAIN)
    stage = current_stage(with_added_phases(status.phases, job.spec)) or first
    if not has_claim(job, status, jobs):
        return mounted_claims(job, stage)
    return [*mounted_claims(job, stage), *own_claims(job, stage, waiting)] if waiting else []


async def _with_complaint(api: Api, namespace: str, claim: Claim, uid: str) -> Claim:
    """Return the claim with its newest warning. Only events tell why a provisioner makes no volume: neither the claim
    nor its class does."""
    try:
        events = await api.first_of("Event", namespace, f"involvedObject.uid={uid}", _EVENTS)
    except Unreadable:
        return claim
    except ApiException as error:
        if error.status == _FORBIDDEN:  # the rights are the user's own (rbac.create: false), or of an earlier chart
            return claim
        raise
    return replace(claim, complaint=newest_warning(events))


@dataclass
class _Found:
    """Children of a job, reduced to the fields that a pass needs: the raw objects may be large and many."""

    uid: str
    jobs: list[ChildJob] = field(default_factory=list)
    finished: list[ChildJob] = field(default_factory=list)
    """The elements of `jobs` that have ended and have no running pod."""
    pods: Pods = NO_PODS
    of_deleted_job: list[str] = field(default_factory=list)
    """Names of children of a deleted job of the same name."""
    orphans: list[str] = field(default_factory=list)
    """Names of pods of the job without a Job."""
    count: int = 0

    def is_own(self, body: Json) -> bool:
        """Count an object; return whether it is a child of the job."""
        self.count += 1
        if belongs_to(self.uid, body):
            return True
        if is_of_another(self.uid, body):
            self.of_deleted_job.append(_name(body))
        return False

    async def list_jobs(self, api: Api, memory: Memory, job: PseudoRealJob) -> None:
        versions, listed = dict[str, int](), list[str]()
        skip = partial(self.skip, versions)
        async for body in api.each("Job", job.metadata.namespace, _selector(job), skipped=skip, listed=listed.append):
            versions[body["metadata"].get("uid", "")] = version_of_object(body)
            if self.is_own(body):
                child = read_job(body)
                self.jobs.append(child)
                if has_no_pod_left(body):
                    self.finished.append(child)
        memory.was_read("Job", job_name(job), versions, version_of(listed[-1]))

    async def list_pods(self, api: Api, memory: Memory, job: PseudoRealJob, finished: frozenset[str]) -> None:
        """List the pods, without the pods of finished Jobs of earlier executions: these are kept for their logs, and
        may be thousands."""
        without = f",{POD_JOB} notin ({','.join(sorted(finished))})" if finished else ""
        versions, listed = dict[str, int](), list[str]()
        skip, pods = partial(self.skip, versions), list[Pod]()
        async for body in api.each(
            "Pod", job.metadata.namespace, _selector(job) + without, skipped=skip, listed=listed.append
        ):
            versions[body["metadata"].get("uid", "")] = version_of_object(body)
            if self.is_own(body):
                pods.append(read_pod(body))
            elif is_orphan(self.uid, body):
                self.orphans.append(_name(body))
        self.pods = Pods(pods)
        memory.was_read("Pod", job_name(job), versions, version_of(listed[-1]), finished)

    def take_jobs(self, known: Children) -> None:
        self.jobs, self.finished = list(known.jobs), list(known.finished)
        self.of_deleted_job = list(known.of_deleted_job)

    def take_pods(self, known: Children, finished: frozenset[str]) -> None:
        self.pods = known.pods_without(finished)
        self.orphans = list(known.orphans)

    def skip(self, versions: dict[str, int], body: Json, reason: Unreadable) -> None:
        """Count an object that is beyond the bounds, and add it to the present `versions`. Raises Unreadable with its
        reason if the object is a child of the job: without this child a pass would decide wrongly."""
        if uid := body["metadata"].get("uid"):
            versions[uid] = version_of_object(body)
        if body["metadata"] and self.is_own(body):
            raise Unreadable(reason.reason, f"{_name(body)}, which belongs to it, cannot be read: {reason}")


def build_observed(
    report_store: ReportStore,
    job: PseudoRealJob,
    status: PseudoRealJobStatus,
    jobs: Sequence[ChildJob],
    pods: Pods,
    now: datetime,
    deleted_pods: tuple[Pod, ...] = (),
) -> Observed:
    """Return the observation of a job, its children and its pods' reports. From now on the report store follows the
    pod of rank 0."""
    key, execution = (job.metadata.namespace, job.metadata.uid), current_execution(job, status, jobs)
    membership = memberships(status).get(execution) if execution else None
    first = membership.pod_of(0) if membership else 0  # completion index of the pod of worker 0
    pod = _reporting_pod(pods, execution, first)
    report_store.set_rank_zero_pod(key, ReportingPod(key, pod.execution, first, pod.name) if pod else None, now)
    claim = claim_of(job)
    claims = {(_CLAIM, claim)} if claim and has_claim(job, status, jobs) else set()
    observed = Observed(
        job=job,
        status=status,
        jobs=tuple(jobs),
        pods=pods,
        existing=frozenset({("Job", one.name) for one in jobs} | claims),
        last_reports=report_store.of_job(key),
        deleted_pods=deleted_pods,
        silent_since=report_store.silent_since(key, now),
        has_reported=report_store.has_reported(key),
        path_is_cut=report_store.path_is_cut,
        refuses_reports=report_store.refuses_reports(key, now),
    )
    return with_worker_indices(observed)


def _executions_heard(
    job: PseudoRealJob, status: PseudoRealJobStatus, jobs: Sequence[ChildJob], pods: Pods
) -> set[Execution]:
    """Return the executions with relevant reports: the present execution, and all executions with live pods."""
    present = current_execution(job, status, jobs)
    alive = {execution for execution, members in pods.by_execution.items() if members.alive}
    return alive | ({present} if present else set())


def has_claim(job: PseudoRealJob, status: PseudoRealJobStatus, jobs: Sequence[ChildJob]) -> bool:
    """Return whether the claim of the job is known to exist: it is created before the Job of the present execution."""
    execution = current_execution(job, status, jobs)
    return any(one.execution == execution for one in jobs)


def current_execution(job: PseudoRealJob, status: PseudoRealJobStatus, jobs: Sequence[ChildJob]) -> Execution | None:
    """Return the present execution; None if no stage is left."""
    stage = current_stage(with_added_phases(status.phases, job.spec))
    return stage.execution(max([1, status.execution, *(job.execution.number for job in jobs)])) if stage else None


def claim_of(job: PseudoRealJob) -> str | None:
    """Return the name of the claim that the operator creates for the job; None if the job has no volume, or names an
    existing claim."""
    volume = job.spec.checkpoint.storage.mounted
    return None if volume is None or volume.claim_name is not None else claim_name(job.metadata.name)


def _reporting_pod(pods: Pods, present: Execution | None, first: int) -> Pod | None:
    """Return the pod of rank 0, which reports the progress, if it runs; else None."""
    if present is None or present.kind is not StageKind.TRAIN:
        return None
    found = (pod for pod in pods.of(present).alive if pod.index == first)
    return next((pod for pod in found if pod.phase is PodPhase.RUNNING), None)


def _name(body: Json) -> str:
    return str(body["metadata"]["name"])

"""Observed state of a job in one reconcile pass, with its direct consequences; the rules decide on it. Pure.

Time in a queue does not count against a job: the job's clocks are moved forward by the time for which a queue holds the
job's pods.
"""

from collections import defaultdict
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from enum import StrEnum
from functools import cached_property
from operator import attrgetter

from pseudoreal_api.names import LABEL_JOB
from pseudoreal_api.resolved.resolve import rank_counts
from pseudoreal_api.spec.job import JobMetadata, PseudoRealJob, PseudoRealJobSpec
from pseudoreal_api.status.status import PseudoRealJobStatus
from pseudoreal_api.wire.messages import InPlace, TerminationMessage
from pseudoreal_api.wire.reports import PodReport

from pseudoreal_operator import clock
from pseudoreal_operator.changes import status_with
from pseudoreal_operator.observe.claims import Claim
from pseudoreal_operator.observe.ranks import first_ranks, recorded_first_ranks, reported_first_rank
from pseudoreal_operator.observe.stages import (
    Execution,
    Stage,
    current_stage,
    is_started,
    with_added_phases,
    with_stage_started,
    workers_of,
)


class JobState(StrEnum):
    ACTIVE = "Active"
    COMPLETE = "Complete"
    FAILED = "Failed"


@dataclass(frozen=True)
class ChildJob:
    """A batch/v1 Job. `ended`: time at which the Job completed or failed, in RFC 3339; None: the Job is active."""

    name: str
    execution: Execution
    state: JobState
    ended: str | None = None
    deleting: bool = False
    outlives_pods: bool = False
    """Whether the Job and its other pods survive a failed pod, until the operator fails the Job."""
    failed_by_operator: bool = False
    """Whether the operator has failed the Job (maxFailedIndexes: 0), so that the Job controller ends its pods."""
    queued: bool = False
    """Whether a queue holds the Job: the Job is suspended until the queue admits it."""
    held: str | None = None
    """Time at which the queue last began to hold the Job, in RFC 3339; None: no queue holds the Job."""
    admitted: str | None = None
    """Time at which the queue last admitted the Job, in RFC 3339; None: no queue has held the Job, or a queue holds it
    now."""
    start_time: str | None = None
    """Time at which the Job controller started the Job, or started it again after an admission, in RFC 3339; None: not
    started."""
    uid: str = ""
    workers: int | None = None
    """Number of workers at the creation of the Job, without spare pods; None: unknown."""
    last_steps: str | None = None
    """Last steps of the phase and of the job, as known at the creation of the Job, written PHASE/JOB; None for a
    delink."""
    excludes_until: str | None = None
    """Time until which the pods wait for nodes other than the excluded nodes, in RFC 3339; None: no nodes are
    excluded."""


class PodPhase(StrEnum):
    """State of the trainer container. Kubernetes' own phase of a pod changes only when all containers have ended."""

    PENDING = "Pending"
    RUNNING = "Running"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"


@dataclass(frozen=True)
class Termination:
    """End of the trainer container."""

    exit_code: int
    reason: str
    text: str
    """Termination message as Kubernetes has it, sanitized."""
    message: TerminationMessage | None
    """Parsed termination message; None if `text` is not a trainer's termination message."""
    finished: str = ""


@dataclass(frozen=True)
class Blocker:
    """Kubernetes' reason and message for a pod that does not start: unschedulable, no image, ..."""

    reason: str
    message: str


@dataclass(frozen=True)
class Pod:
    name: str
    execution: Execution
    index: int
    phase: PodPhase
    ready: bool = False
    node: str = ""
    started: str | None = None
    """Time at which the trainer container started, in RFC 3339; None: not started."""
    termination: Termination | None = None
    disruption: str | None = None
    """Kubernetes' reason for ending the pod by itself: preemption, eviction, a lost node; None: the pod was not
    disrupted."""
    conditions: frozenset[str] = frozenset()
    """Types of the pod's conditions that are True."""
    reason: str = ""
    """Kubernetes' reason for the state of the pod as a whole; empty: no reason."""
    complaint: str = ""
    """Kubernetes' reason and message for the state of the pod as a whole; empty: neither."""
    blocker: Blocker | None = None
    memory_limit: str = ""
    """Memory limit of the trainer container, as a Kubernetes quantity; empty: no limit."""
    workers: int = 0
    """Number of workers of the pod's execution, from the pod's environment; 0 for a delink."""
    deletion_deadline: str | None = None
    """End of the grace period of a pod that is being deleted, in RFC 3339; None: the pod is not being deleted."""
    grace_seconds: int | None = None
    """Grace period of the deletion, in seconds; None: the pod is not being deleted."""
    sidecars: tuple[str, ...] = ()
    """Names of sidecars: containers that keep running after the trainer has ended, such as an injected proxy."""
    lingers: bool = False
    """Whether Kubernetes counts the pod as running although the trainer has ended: another container keeps running,
    or the kubelet has yet to report the end of the pod, which takes a moment."""
    has_run: bool = True
    """Whether any container of the pod has ever run."""
    ended: str | None = None
    """Time at which a pass first saw that the pod had failed, in RFC 3339. None: the pod has not failed, or Kubernetes
    reports the time of the failure."""

    @property
    def is_alive(self) -> bool:
        return self.phase is PodPhase.RUNNING or self.phase is PodPhase.PENDING


class Pods(tuple[Pod, ...]):
    """Pods at one moment. While no pod changes, passes get the same object, so each property is computed once per
    change instead of once per pass: a job may have 10,000 pods."""

    def of(self, execution: Execution) -> "Pods":
        """Return the pods of an execution, in the order of their indices."""
        return self.by_execution.get(execution, NO_PODS)

    @cached_property
    def by_execution(self) -> "dict[Execution, Pods]":
        found: defaultdict[Execution, list[Pod]] = defaultdict(list)
        for pod in self:
            found[pod.execution].append(pod)
        for pods in found.values():
            pods.sort(key=attrgetter("index"))
        if len(found) == 1 and next(iter(found.values())) == [*self]:
            return dict.fromkeys(found, self)
        return {execution: Pods(pods) for execution, pods in found.items()}

    @cached_property
    def _by_phase(self) -> "dict[PodPhase, Pods]":
        found: dict[PodPhase, list[Pod]] = {phase: [] for phase in PodPhase}
        for pod in self:
            found[pod.phase].append(pod)
        return {phase: self if len(pods) == len(self) else Pods(pods) for phase, pods in found.items()}

    @cached_property
    def alive(self) -> "Pods":
        return self if not (self.failed or self.succeeded) else Pods(pod for pod in self if pod.is_alive)

    @property
    def pending(self) -> "Pods":
        return self._by_phase[PodPhase.PENDING]

    @cached_property
    def without_node(self) -> "Pods":
        return Pods(pod for pod in self if not pod.node)

    @property
    def failed(self) -> "Pods":
        return self._by_phase[PodPhase.FAILED]

    @property
    def succeeded(self) -> "Pods":
        return self._by_phase[PodPhase.SUCCEEDED]

    @cached_property
    def terminated(self) -> "Pods":
        """Pods whose trainer container has ended."""
        return Pods(pod for pod in self if pod.termination)

    @cached_property
    def leaving(self) -> "Pods":
        """Pods that are being deleted and have not ended."""
        return Pods(pod for pod in self.alive if pod.deletion_deadline is not None)

    @cached_property
    def timed(self) -> "Pods":
        """Pods whose state the passage of time alone may change."""
        return Pods(pod for pod in self if pod.deletion_deadline or pod.sidecars or pod.phase is PodPhase.FAILED)

    @cached_property
    def with_sidecars(self) -> "Pods":
        """Pods that sidecars keep."""
        return Pods(pod for pod in self if pod.sidecars)

    @cached_property
    def ready(self) -> int:
        """Number of ready pods."""
        return sum(pod.ready for pod in self)

    @cached_property
    def indices(self) -> frozenset[int]:
        return frozenset(pod.index for pod in self)

    @cached_property
    def names(self) -> frozenset[str]:
        return frozenset(pod.name for pod in self)

    @cached_property
    def nodes(self) -> dict[int, str]:
        """Index -> node; of several pods with one index, the node of a pod that is alive."""
        ended = [pod for pod in self if not pod.is_alive] if len(self.alive) < len(self) else []
        return {pod.index: pod.node for pod in (*ended, *self.alive) if pod.node}


NO_PODS = Pods()


def ended_at(pod: Pod, now: datetime) -> datetime:
    """Return the time at which the pod ended; `now` if unknown. `Sightings` has already bounded the times that
    Kubernetes reports."""
    end = (pod.termination.finished if pod.termination else "") or pod.ended
    return clock.from_text(end) if end else now


SIDECAR_SECONDS = 15.0
"""Seconds that other containers have to end after the trainer. Native sidecars end in this time, and so do proxies that
receive a signal."""


def is_kept_by_sidecar(pod: Pod, now: datetime) -> bool:
    """Return whether sidecars keep the pod, and the trainer ended at least SIDECAR_SECONDS ago."""
    return bool(pod.sidecars) and now >= ended_at(pod, now) + timedelta(seconds=SIDECAR_SECONDS)


@dataclass(frozen=True)
class LastReport:
    """State of a training pod from its reports since its ranks were last restarted in place. All times are of the
    operator's clock."""

    execution: Execution
    index: int
    pod: str
    """Name of the pod. Execution and index alone do not identify a pod: a queue may evict the pods of an execution and
    admit new ones later."""
    first: datetime
    """Time of the pod's first report since its ranks were last restarted in place."""
    last: datetime
    """Time of the pod's newest report."""
    report: PodReport
    """Newest report of the pod, perhaps with fewer ranks than the pod has sent."""
    steps: int = 0
    """Number of steps of the pod's rank with the most steps."""
    training_since: datetime | None = None
    """Time at which a rank of the pod was first seen in a step or after one; None: no rank has started its first
    step."""
    progressed: datetime | None = None
    """Time at which the pod's steps were last seen to grow, or a save was last seen in progress; None: never."""
    log_unchanged: datetime | None = None
    """Time of the last reading of the silent pod's log without new progress; None: never."""
    told_to_finish: bool = False
    """Whether an answer to a report has told the pod to end its phase."""
    told_membership: tuple[int, datetime] | None = None
    """Number of the newest membership that an answer to a report has told the pod, and the time of the first such
    answer; None: no answer contained a membership that the pod had yet to begin. A waiting spare pod keeps it."""

    @property
    def restarts_in_place(self) -> int:
        """Number of the pod's newest restart in place, even while it waits for the other pods; 0: none."""
        return self.report.in_place.restarts if self.report.in_place else 0

    @property
    def restarted(self) -> InPlace | None:
        """The pod's account of its restarts in place, once its ranks have started again; None: no restart, or no ranks
        yet."""
        return self.report.in_place if self.report.ranks else None

    @property
    def waits_to_restart(self) -> bool:
        """Whether the pod has lost its ranks, and waits for the other pods to restart them in place."""
        return self.report.in_place is not None and not self.report.ranks


@dataclass(frozen=True)
class Observed:
    """Observations of a job in one pass. `existing`: (kind, name) of the children that exist. `objects_of_deleted_job`:
    names of objects that a deleted job of the same name left, and that the garbage collector has yet to remove.
    `orphans`: names of the job's own pods that run without a Job."""

    job: PseudoRealJob
    status: PseudoRealJobStatus
    jobs: tuple[ChildJob, ...] = ()
    pods: Pods = NO_PODS
    existing: frozenset[tuple[str, str]] = frozenset()
    objects_of_deleted_job: tuple[str, ...] = ()
    orphans: tuple[str, ...] = ()
    last_reports: tuple[LastReport, ...] = ()
    deleted_pods: tuple[Pod, ...] = ()
    """Deleted pods with known termination messages."""
    spares: Pods = NO_PODS
    """Spare pods that replace no worker; `pods` are workers only."""
    replaced: Pods = NO_PODS
    """Pods that spare pods have replaced."""
    non_worker_reports: tuple[LastReport, ...] = ()
    """Reports of pods that are not workers."""
    silent_since: datetime | None = None
    """Start of the silence of all running pods; None: reports arrive, or the silence is short."""
    has_reported: bool = False
    """Whether any pod of the job has reported since a pass first saw the running pod of rank 0."""
    path_is_cut: bool = False
    """Whether the reports of most jobs do not arrive: then the network path is at fault, not a pod."""
    refuses_reports: bool = False
    """Whether pods of the job report, but the report store has no room for them: then a pod without a report is not
    suspected."""
    claims: tuple[Claim, ...] = ()
    """Claims that pods of the present stage mount; empty unless an execution is about to be created, or a pod waits for
    a node."""

    @cached_property
    def every_pod(self) -> Pods:
        others = (*self.spares, *self.replaced)
        return Pods((*self.pods, *others)) if others else self.pods


def with_queue(status: PseudoRealJobStatus, job: ChildJob | None, now: datetime) -> PseudoRealJobStatus:
    """Return the status with clocks that stand still while the queue holds the Job."""
    if job is not None and job.queued and job.state is JobState.ACTIVE:
        begun = status.queued_since or clock.to_text(min(now, _moment(job.held) or now))
        return status_with(status, queued_since=begun)
    since = status.queued_since or _start_of_unobserved_hold(status, job)
    if since is None:
        return status
    until = _end_of_hold(job, clock.from_text(since), now)
    moved = _with_clocks_moved(status, until - clock.from_text(since))
    return status_with(moved, execution_time=clock.to_text(until)) if job else moved


def _with_clocks_moved(status: PseudoRealJobStatus, held: timedelta) -> PseudoRealJobStatus:
    transition = status.transition
    if transition is not None:
        transition = transition.model_copy(update={"deadline": _later(transition.deadline, held)})
    since = status.active_since and _later(status.active_since, held)
    return status_with(status, queued_since=None, active_since=since, transition=transition)


def _start_of_unobserved_hold(status: PseudoRealJobStatus, job: ChildJob | None) -> str | None:
    """Return the start of a hold by a queue that ended before any pass saw it, for instance while the operator was
    away; None if there was no such hold."""
    admitted, created = _moment(job.admitted) if job else None, _moment(status.execution_time)
    return status.execution_time if admitted and created and admitted > created else None


def _end_of_hold(job: ChildJob | None, since: datetime, now: datetime) -> datetime:
    """Return the end of the hold that began at `since`; `now` if the Job controller has not reported the end yet."""
    said = map(_moment, (job.admitted, job.start_time)) if job else ()
    return min([now, *(moment for moment in said if moment and moment >= since)])


def _moment(text: str | None) -> datetime | None:
    return clock.from_text(text) if text else None


def _later(text: str, by: timedelta) -> str:
    return clock.to_text(clock.from_text(text) + by)


@dataclass(frozen=True)
class View:
    """Observations of a job, judged at one time. `execution` and everything that depends on it exist only while a
    stage is left to do."""

    observed: Observed
    now: datetime

    @property
    def spec(self) -> PseudoRealJobSpec:
        return self.observed.job.spec

    @property
    def metadata(self) -> JobMetadata:
        return self.observed.job.metadata

    @cached_property
    def status(self) -> PseudoRealJobStatus:
        """The stored status with four corrections. The execution number is at least the number of every child, because
        a status may have been lost. Phases added to the spec are included. A stage with children has started, because
        the start may not have been recorded. Clocks are moved forward by the time in a queue."""
        executions = [*(job.execution for job in self.observed.jobs), *self.observed.every_pod.by_execution]
        newest = max([1, self.observed.status.execution, *(execution.number for execution in executions)])
        phases = with_added_phases(self.observed.status.phases, self.spec)
        status = status_with(self.observed.status, execution=newest, phases=phases)
        stage = current_stage(status.phases)
        if stage is None:
            return with_queue(status, None, self.now)
        execution = stage.execution(newest)
        if execution in executions and not is_started(phases, stage):
            status = with_stage_started(status, stage)
        return with_queue(status, self._job_of(execution), self.now)

    @property
    def has_unrecorded_start(self) -> bool:
        """Whether the present stage has children, but the stored status does not say that the stage has started."""
        before = with_added_phases(self.observed.status.phases, self.spec)
        return [phase.state for phase in before] != [phase.state for phase in self.status.phases]

    @cached_property
    def stage(self) -> Stage:
        stage = current_stage(self.status.phases)
        assert stage is not None, "a job whose stages are all done has ended"
        return stage

    @cached_property
    def execution(self) -> Execution:
        return self.stage.execution(self.status.execution)

    @property
    def workers(self) -> int:
        """Number of workers of the present execution."""
        made = self.job.workers if self.job else None
        return made or workers_of(self.spec, self.status, self.stage)

    @property
    def job_name(self) -> str:
        """Name of the Job of the present execution, even if another release created the Job."""
        return self.job.name if self.job else self.execution.name(self.metadata)

    @cached_property
    def job(self) -> ChildJob | None:
        """Job of the present execution; None: the Job does not exist, or is being deleted while it runs."""
        return self._job_of(self.execution)

    def _job_of(self, execution: Execution) -> ChildJob | None:
        found = next((job for job in self.observed.jobs if job.execution == execution), None)
        if found and self.is_done(found):
            return replace(found, state=JobState.COMPLETE)
        if found and self._is_kept_by_sidecars_only(found):
            return replace(found, state=JobState.FAILED)
        return None if found and found.deleting and found.state is JobState.ACTIVE else found

    def is_done(self, job: ChildJob) -> bool:
        """Return whether all workers have succeeded although the Job has failed or may never complete. A failed pod
        that is not a worker makes the Job fail. A stuck pod, or a sidecar that keeps a pod running, makes the Job stay
        active."""
        others = self.observed.spares.of(job.execution) or self.observed.replaced.of(job.execution)
        ended_otherwise = job.state is JobState.FAILED or bool(others)
        return (ended_otherwise or self._has_pod_kept_by_sidecar(job)) and self._have_all_succeeded(job)

    def _is_kept_by_sidecars_only(self, job: ChildJob) -> bool:
        """Return whether no trainer of the Job is alive and only sidecars keep its pods: the Job controller counts such
        pods as running. Call it only if some worker has not succeeded."""
        left = self.observed.pods.of(job.execution).alive
        return job.state is JobState.ACTIVE and not job.queued and not left and self._has_pod_kept_by_sidecar(job)

    def _has_pod_kept_by_sidecar(self, job: ChildJob) -> bool:
        return any(is_kept_by_sidecar(pod, self.now) for pod in self.observed.pods.of(job.execution).with_sidecars)

    def _have_all_succeeded(self, job: ChildJob) -> bool:
        """Return whether all workers of the Job have succeeded, in their own pods or in spare pods."""
        done = self.observed.pods.of(job.execution).succeeded.indices
        return job.workers is not None and done == set(range(job.workers))

    @property
    def pods(self) -> Pods:
        return self.observed.pods.of(self.execution)

    @cached_property
    def missing_workers(self) -> list[int]:
        """Numbers of the workers without a pod; empty if there is no Job, or if the operator has failed the Job."""
        if self.job is None or self.job.failed_by_operator:
            return []
        return sorted(set(range(self.workers)) - self.pods.indices)

    @cached_property
    def terminated_pods(self) -> list[Pod]:
        """Pods of the present execution whose trainer container has ended, and its deleted pods whose termination
        messages are known."""
        return [*self.pods.terminated, *(pod for pod in self.observed.deleted_pods if pod.execution == self.execution)]

    @cached_property
    def last_reports(self) -> list[LastReport]:
        """Reports of the present execution's workers, in the order of their numbers."""
        return sorted(
            (last_report for last_report in self.observed.last_reports if last_report.execution == self.execution),
            key=attrgetter("index"),
        )

    @cached_property
    def reporting(self) -> list[LastReport]:
        """Reports of the present execution's pods that still exist."""
        names = self.pods.names
        return [last_report for last_report in self.last_reports if last_report.pod in names]

    @property
    def unplaced_pods(self) -> list[Pod]:
        """Pods that wait for a node."""
        return [pod for pod in self.pods.without_node if pod.phase is PodPhase.PENDING]

    @property
    def started_pods(self) -> int:
        """Number of pods whose container runs or has run."""
        return len(self.pods) - len(self.pods.pending)

    @property
    def placed_pods(self) -> int:
        """Number of pods that have a node."""
        return len(self.pods) - len(self.pods.without_node)

    def pod_of_rank(self, rank: int) -> Pod | None:
        first = rank // self.ranks_per_pod * self.ranks_per_pod
        return next((pod for pod in self.pods if self._first_ranks.get(pod.index) == first), None)

    def first_rank(self, pod: Pod) -> int:
        return self._first_ranks.get(pod.index, pod.index * self.ranks_per_pod)

    @cached_property
    def _first_ranks(self) -> dict[int, int]:
        # After a restart the operator has no reports yet, but the status has the ranks.
        known = recorded_first_ranks(self.observed.status.placement, self.execution) | self.reported_first_ranks
        return first_ranks(self.workers, self.ranks_per_pod, known)

    @cached_property
    def reported_first_ranks(self) -> dict[int, int]:
        """Worker number -> first rank, for each pod that has reported its ranks; empty without a topology: ranks then
        follow the numbers of the workers."""
        if self.spec.scheduling.topology is None:
            return {}
        said = {
            last_report.index: reported_first_rank(last_report.report, self.ranks_per_pod)
            for last_report in self.reporting
        }
        return {index: rank for index, rank in said.items() if rank is not None}

    @cached_property
    def ranks_per_pod(self) -> int:
        return rank_counts(self.spec, self.spec.phases[self.stage.index]).processes_per_worker

    @property
    def logs_command(self) -> str:
        return f"kubectl logs -n {self.metadata.namespace} -l {LABEL_JOB}={self.metadata.name} --prefix --tail=50"

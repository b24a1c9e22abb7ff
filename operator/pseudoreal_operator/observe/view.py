"""What was seen of a job at one look, with what follows from it directly; the rules decide on it. Pure.

A queue that holds a job's pods takes no time from the job: its clocks move on by as long as they are held.
"""

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
from pseudoreal_operator.observe.ranks import first_rank_said, first_ranks, first_ranks_of
from pseudoreal_operator.observe.size import workers_of
from pseudoreal_operator.observe.stages import Execution, Stage, current_stage, with_added


class JobState(StrEnum):
    ACTIVE = "Active"
    COMPLETE = "Complete"
    FAILED = "Failed"


@dataclass(frozen=True)
class ChildJob:
    """A batch/v1 Job. `ended` is when it completed or failed, in RFC 3339."""

    name: str
    execution: Execution
    state: JobState
    ended: str | None = None
    deleting: bool = False
    outlives_pods: bool = False
    """Whether a pod that fails leaves the Job and the other pods as they are, until the Job is given up."""
    given_up: bool = False
    """Whether the operator wants the Job to end its pods, as one of them has failed."""
    queued: bool = False
    """Whether the Job is suspended by another than the operator: a queue that has not admitted it."""
    held: str | None = None
    """The time at which its queue last began to hold it, while it does, in RFC 3339."""
    admitted: str | None = None
    """The time at which its queue last let it go, if one ever held it, in RFC 3339."""
    begun: str | None = None
    """The time at which it was first made, or last admitted by its queue, in RFC 3339."""
    uid: str = ""
    workers: int | None = None
    """Number of workers that it was made with: of pods without the spare ones."""
    last_steps: str | None = None
    """The steps at which its phase and the job end at the latest, as they were when it was made; None for a delink."""
    excludes_until: str | None = None
    """The time until which its pods wait for other nodes than those that rejected pods, in RFC 3339; None where it
    excludes none."""


class PodPhase(StrEnum):
    """What became of the trainer container. Kubernetes' own phase of a pod waits for the end of all containers."""

    PENDING = "Pending"
    RUNNING = "Running"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"


@dataclass(frozen=True)
class Termination:
    """How the trainer container ended."""

    exit_code: int
    reason: str
    text: str
    """The termination message as Kubernetes has it."""
    message: TerminationMessage | None
    """The termination message as a trainer wrote it; None when it is not a trainer's."""
    finished: str = ""


@dataclass(frozen=True)
class Obstacle:
    """Why a pod does not run yet, in Kubernetes' words."""

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
    """The time at which its container started, in RFC 3339."""
    termination: Termination | None = None
    disruption: str | None = None
    """Kubernetes' reason, when it ended the pod itself: preemption, eviction, a lost node."""
    conditions: frozenset[str] = frozenset()
    """Types of the pod's conditions that are True."""
    reason: str = ""
    """Kubernetes' word for what became of the pod as a whole."""
    complaint: str = ""
    """`reason`, and a message."""
    obstacle: Obstacle | None = None
    memory_limit: str = ""
    """Memory limit of the trainer container, as the pod gives it."""
    workers: int = 0
    """Number of workers of its execution, as it is told; 0 for a delink."""
    leaves_by: str | None = None
    """The time by which a pod that is being deleted is to be gone, its grace period included, in RFC 3339."""
    grace_seconds: int | None = None
    """The grace period that is part of `leaves_by`."""
    runs_on: tuple[str, ...] = ()
    """Names of containers that run although the trainer has ended, such as an injected proxy."""
    lingers: bool = False
    """Whether Kubernetes takes the pod for running although the trainer has ended: another container runs on, or the
    kubelet has yet to say that the pod is over, which it does a moment later."""
    has_run: bool = True
    """Whether any container of the pod has ever run."""
    ended: str | None = None
    """The time at which the pod was first seen to have ended, where Kubernetes tells none, in RFC 3339."""

    @property
    def is_alive(self) -> bool:
        return self.phase in (PodPhase.PENDING, PodPhase.RUNNING)

    @property
    def has_succeeded(self) -> bool:
        return self.phase is PodPhase.SUCCEEDED


def ended_at(pod: Pod, now: datetime) -> datetime:
    """Return when the pod ended; `now` where nobody knows. Moments that Kubernetes tells are bounded as they are read,
    by `Sightings`."""
    told = (pod.termination.finished if pod.termination else "") or pod.ended
    return clock.from_text(told) if told else now


RUN_ON_SECONDS = 15.0
"""Seconds that other containers have to end after the trainer: native sidecars do, and proxies that are told to."""


def runs_on(pod: Pod, now: datetime) -> bool:
    """Return whether other containers keep a pod whose trainer ended long ago."""
    return bool(pod.runs_on) and now >= ended_at(pod, now) + timedelta(seconds=RUN_ON_SECONDS)


@dataclass(frozen=True)
class Heard:
    """What a pod of a training stage has reported since its ranks were last restarted in place. All moments are of the
    operator's clock."""

    execution: Execution
    index: int
    pod: str
    """Name of the pod. A queue may take the pods of an execution back, and let it have others later."""
    first: datetime
    """The moment at which the pod was first heard."""
    last: datetime
    """The moment at which the pod was last heard."""
    report: PodReport
    """The newest report of the pod."""
    begun: datetime | None = None
    """The moment at which a rank of the pod was first seen in a step, or past one."""
    progressed: datetime | None = None
    """The moment at which its steps were last seen to grow, or a save to go on."""
    log_stood: datetime | None = None
    """The moment at which its log was last read and said the same as the time before, while it was silent."""
    told_to_finish: bool = False
    """Whether the pod was told to end its phase."""

    @property
    def restarted(self) -> InPlace | None:
        """The restarts in place after which its ranks have begun."""
        return self.report.in_place if self.report.ranks else None

    @property
    def waits_to_restart(self) -> bool:
        """Whether it has lost its ranks, and waits for the other pods to restart them in place."""
        return self.report.in_place is not None and not self.report.ranks


@dataclass(frozen=True)
class Observed:
    """What one pass sees of a job. `existing` holds (kind, name) of the children that are there. `foreign` names what a
    deleted job of the same name left and the garbage collector has yet to remove. `orphans` names the job's own pods
    that run without a Job."""

    job: PseudoRealJob
    status: PseudoRealJobStatus
    jobs: tuple[ChildJob, ...] = ()
    pods: tuple[Pod, ...] = ()
    existing: frozenset[tuple[str, str]] = frozenset()
    foreign: tuple[str, ...] = ()
    orphans: tuple[str, ...] = ()
    heard: tuple[Heard, ...] = ()
    gone: tuple[Pod, ...] = ()
    """Pods that said something when they ended, and are deleted."""
    spares: tuple[Pod, ...] = ()
    """Spare pods that have no place: `pods` are workers alone."""
    replaced: tuple[Pod, ...] = ()
    """Pods whose places spare pods have."""
    heard_apart: tuple[Heard, ...] = ()
    """What was heard of pods that are no workers."""
    unheard_since: datetime | None = None
    """The moment since which no report of its pods arrives that run; None: reports arrive, or it is not long."""
    was_heard: bool = False
    """Whether a report of its pods ever arrived that run."""
    path_is_cut: bool = False
    """Whether the reports of most jobs do not arrive: it is the path then, and no pod."""

    @property
    def every_pod(self) -> tuple[Pod, ...]:
        return self.pods + self.spares + self.replaced

    @cached_property
    def pods_kept(self) -> tuple[Pod, ...]:
        """Workers' pods that other containers keep."""
        return tuple(pod for pod in self.pods if pod.runs_on)


def with_queue(status: PseudoRealJobStatus, job: ChildJob | None, now: datetime) -> PseudoRealJobStatus:
    """The status with the clocks as the queue leaves them."""
    if job is not None and job.queued and job.state is JobState.ACTIVE:
        begun = status.queued_since or clock.to_text(min(now, _moment(job.held) or now))
        return status_with(status, queued_since=begun)
    since = status.queued_since or _unseen(status, job)
    if since is None:
        return status
    until = _admitted(job, clock.from_text(since), now)
    moved = _moved_on(status, until - clock.from_text(since))
    return status_with(moved, execution_time=clock.to_text(until)) if job else moved


def _moved_on(status: PseudoRealJobStatus, held: timedelta) -> PseudoRealJobStatus:
    transition = status.transition
    if transition is not None:
        transition = transition.model_copy(update={"deadline": _later(transition.deadline, held)})
    since = status.active_since and _later(status.active_since, held)
    return status_with(status, queued_since=None, active_since=since, transition=transition)


def _unseen(status: PseudoRealJobStatus, job: ChildJob | None) -> str | None:
    """The time since which a queue held the Job that it let go before anybody looked, for instance while the operator
    was away."""
    admitted, asked = _moment(job.admitted) if job else None, _moment(status.execution_time)
    return status.execution_time if admitted and asked and admitted > asked else None


def _admitted(job: ChildJob | None, since: datetime, now: datetime) -> datetime:
    """The time at which the hold that began at `since` was over. The Job controller may not have said so yet."""
    said = map(_moment, (job.admitted, job.begun)) if job else ()
    return min([now, *(moment for moment in said if moment and moment >= since)])


def _moment(text: str | None) -> datetime | None:
    return clock.from_text(text) if text else None


def _later(text: str, by: timedelta) -> str:
    return clock.to_text(clock.from_text(text) + by)


@dataclass(frozen=True)
class View:
    """What was seen of a job, judged at one time. `execution` and what depends on it exist while a stage is left to
    do."""

    seen: Observed
    now: datetime

    @property
    def spec(self) -> PseudoRealJobSpec:
        return self.seen.job.spec

    @property
    def metadata(self) -> JobMetadata:
        return self.seen.job.metadata

    @cached_property
    def status(self) -> PseudoRealJobStatus:
        """The status, with an execution that no child is ahead of, even if a status was lost, with phases that were
        added, and with clocks that the time in a queue has moved on."""
        executions = [job.execution for job in self.seen.jobs] + [pod.execution for pod in self.seen.every_pod]
        newest = max([1, self.seen.status.execution, *(execution.number for execution in executions)])
        phases = with_added(self.seen.status.phases, self.spec)
        status = status_with(self.seen.status, execution=newest, phases=phases)
        stage = current_stage(status.phases)
        return with_queue(status, self._job_of(stage.execution(newest)) if stage else None, self.now)

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
        """Number of workers that the present execution wants."""
        made = self.job.workers if self.job else None
        return made or workers_of(self.spec, self.status, self.stage)

    @property
    def job_name(self) -> str:
        """Name of the Job of the present execution, whichever release made it."""
        return self.job.name if self.job else self.execution.name(self.metadata)

    @cached_property
    def job(self) -> ChildJob | None:
        """The Job of the present execution; one that is being deleted while it runs counts as gone."""
        return self._job_of(self.execution)

    def _job_of(self, execution: Execution) -> ChildJob | None:
        found = next((job for job in self.seen.jobs if job.execution == execution), None)
        if found and self.is_done(found):
            return replace(found, state=JobState.COMPLETE)
        if found and self._is_kept_alone(found):
            return replace(found, state=JobState.FAILED)
        return None if found and found.deleting and found.state is JobState.ACTIVE else found

    def is_done(self, job: ChildJob) -> bool:
        """Whether all workers have succeeded, whatever becomes of pods that are none: one that is lost fails the Job in
        the end, and one that cannot be ended keeps it. So does one in which another container runs on."""
        ended_otherwise = job.state is JobState.FAILED or any(
            pod.execution == job.execution for pod in (*self.seen.spares, *self.seen.replaced)
        )
        return (ended_otherwise or self._has_pod_that_runs_on(job)) and self._all_succeeded(job)

    def _is_kept_alone(self, job: ChildJob) -> bool:
        """Whether no trainer of the Job is left, not all have succeeded, and only other containers keep its pods: the
        Job controller takes such pods for running."""
        left = any(pod.is_alive for pod in self.seen.pods if pod.execution == job.execution)
        return job.state is JobState.ACTIVE and not job.queued and not left and self._has_pod_that_runs_on(job)

    def _has_pod_that_runs_on(self, job: ChildJob) -> bool:
        return any(pod.execution == job.execution and runs_on(pod, self.now) for pod in self.seen.pods_kept)

    def _all_succeeded(self, job: ChildJob) -> bool:
        """Whether all workers have succeeded, whichever pods they are."""
        done = {pod.index for pod in self.seen.pods if pod.execution == job.execution and pod.has_succeeded}
        return job.workers is not None and done == set(range(job.workers))

    @cached_property
    def pods(self) -> list[Pod]:
        return sorted((pod for pod in self.seen.pods if pod.execution == self.execution), key=attrgetter("index"))

    @property
    def gone(self) -> list[int]:
        """Numbers of the workers whose pods are gone, though the operator has not ended them."""
        if self.job is None or self.job.given_up:
            return []
        return sorted(set(range(self.workers)) - {pod.index for pod in self.pods})

    @cached_property
    def words(self) -> list[Pod]:
        """The pods, and those that are gone and whose last words are known."""
        return self.pods + [pod for pod in self.seen.gone if pod.execution == self.execution]

    @cached_property
    def heard(self) -> list[Heard]:
        """What was heard of the present execution, in the order of its pods."""
        return sorted(
            (heard for heard in self.seen.heard if heard.execution == self.execution), key=attrgetter("index")
        )

    @cached_property
    def speaking(self) -> list[Heard]:
        """What was heard of the pods that there are."""
        names = {pod.name for pod in self.pods}
        return [heard for heard in self.heard if heard.pod in names]

    @property
    def started_pods(self) -> int:
        """Number of pods whose container runs or has run."""
        return sum(pod.phase is not PodPhase.PENDING for pod in self.pods)

    @property
    def placed_pods(self) -> int:
        """Number of pods that have a node."""
        return sum(bool(pod.node) for pod in self.pods)

    def pod_of_rank(self, rank: int) -> Pod | None:
        first = rank // self.ranks_per_pod * self.ranks_per_pod
        return next((pod for pod in self.pods if self._first_ranks.get(pod.index) == first), None)

    def first_rank(self, pod: Pod) -> int:
        return self._first_ranks.get(pod.index, pod.index * self.ranks_per_pod)

    @cached_property
    def _first_ranks(self) -> dict[int, int]:
        # What the operator has heard it forgets when it is restarted, and the status has it then.
        known = first_ranks_of(self.seen.status.placement, self.execution) | self.said_first_ranks
        return first_ranks(self.workers, self.ranks_per_pod, known)

    @cached_property
    def said_first_ranks(self) -> dict[int, int]:
        """Number of each pod that has said it -> its first rank."""
        said = {heard.index: first_rank_said(heard.report, self.ranks_per_pod) for heard in self.speaking}
        return {index: rank for index, rank in said.items() if rank is not None}

    @cached_property
    def ranks_per_pod(self) -> int:
        return rank_counts(self.spec, self.spec.phases[self.stage.index]).processes_per_worker

    @property
    def logs_command(self) -> str:
        return f"kubectl logs -n {self.metadata.namespace} -l {LABEL_JOB}={self.metadata.name} --prefix --tail=50"

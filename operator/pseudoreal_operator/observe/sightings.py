"""Times reported by other machines, bounded by the operator's own observations. In memory only.

A node reports the start and end of a container, the API server the end of a deleted pod's grace period, the Job
controller the start and end of a Job. The clocks of these machines may be hours off. A value was set after the last
pass without the value, and before the first pass that found it; a pass from memory counts as earlier, because the
memory may be behind. A pod ended after its newest report. After the operator's start, without earlier passes and
reports, the only bounds are the first pass and, for pods of the newest execution, the time of their request.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import NamedTuple

from pseudoreal_api.status.status import PseudoRealJobStatus

from pseudoreal_operator import clock
from pseudoreal_operator.observe.report_store import JobKey
from pseudoreal_operator.observe.view import NO_PODS, ChildJob, LastReport, Pod, PodPhase, Pods


@dataclass(frozen=True, slots=True)
class _Field:
    """Value of one field of a child, and the passes between which it appeared."""

    reported: str
    first: datetime
    """Time of the first pass that found the value."""
    before: datetime | None
    """Lower bound of the time when the value was set; None: unknown."""
    previous: datetime | None
    """Time of the previous pass if it found the child, still without the value; else None. `before` may be earlier, if
    the previous pass was from memory."""


@dataclass(slots=True)
class _Child:
    """One child in the pass at `now`. `previous`: time of the previous pass if it found the child; else None. `before`:
    latest time at which the child's previous state was certainly up to date; None: unknown."""

    now: datetime
    before: datetime | None
    previous: datetime | None
    fields: dict[str, _Field]

    def field(self, name: str, reported: str, without: datetime | None = None) -> _Field:
        """Return the field; if its value is new, record this pass as the first that found it. `without`: a time when
        the child lacked a new value; None: unknown."""
        known = self.fields.get(name)
        if known is None or known.reported != reported:
            before = _latest(self.before, without)
            known = self.fields[name] = _Field(reported, self.now, before, self.previous)
        return known

    def bounded(
        self, name: str, reported: str | None, earliest: datetime | None = None, without: datetime | None = None
    ) -> str | None:
        """Return the reported time, bounded; unchanged if None or empty. Upper bound: the first pass that found this
        time. Lower bounds: `earliest`, `without`, and the last pass without this time."""
        found = self.field(name, reported or "", without)
        return _between(reported, _latest(earliest, found.before), found.first) if reported else reported

    def bounded_end(self, pod: Pod) -> str | None:
        """Return the deletion deadline of a pod, bounded: its grace period started between two passes. None if the pod
        is not being deleted.

        The lower bound is the previous pass, even if it was from memory and may have missed the start. Too early a
        deadline would let a pod count as stuck while its ranks save; too late a deadline costs only time. Reports are
        no bound: pods report during their grace period, and on a node without a kubelet after it.
        """
        found = self.field("leaves", pod.deletion_deadline or "")
        if not pod.deletion_deadline or pod.grace_seconds is None:
            return pod.deletion_deadline
        grace = timedelta(seconds=pod.grace_seconds)
        earliest = found.previous + grace if found.previous else None
        return _between(pod.deletion_deadline, earliest, found.first + grace)


class _BoundedPod(NamedTuple):
    """A pod as the last pass found it, and bounded."""

    given: Pod
    earliest: datetime | None
    """Lower bound of all its times; None: there is none."""
    fields: dict[str, _Field]
    bounded: Pod


@dataclass
class _LastPass:
    """The last pass over the children of a job."""

    time: datetime | None = None
    """Time of the pass."""
    last: datetime | None = None
    """Latest time at which the children, as the passes know them, were up to date."""
    jobs: dict[str, dict[str, _Field]] = field(default_factory=dict)
    """Name of a Job -> its fields."""
    pods: dict[str, _BoundedPod] = field(default_factory=dict)
    """Name of a pod -> the pod."""
    given: tuple[Pods, tuple[ChildJob, ...], datetime | None] | None = None
    """Pods and Jobs before they were bounded, and the time at which the newest pods were requested."""
    bounded: tuple[list[ChildJob], Pods] = ([], NO_PODS)
    """The same children, bounded."""

    def child(self, fields: dict[str, _Field] | None, now: datetime) -> _Child:
        """Return a child of the pass at `now`. `fields`: its fields in this last pass; None: this pass did not find
        it."""
        return _Child(now, None, None, {}) if fields is None else _Child(now, self.last, self.time, fields)


class Sightings:
    """Record of the passes that first found each reported time of each child."""

    def __init__(self) -> None:
        self._jobs: dict[JobKey, _LastPass] = {}

    def forget(self, job: JobKey) -> None:
        self._jobs.pop(job, None)

    def with_bounded_times(
        self,
        job: JobKey,
        status: PseudoRealJobStatus,
        jobs: Sequence[ChildJob],
        pods: Pods,
        now: datetime,
        behind: timedelta = timedelta(0),
        last_reports: Callable[[], Iterable[LastReport]] = tuple,
    ) -> tuple[list[ChildJob], Pods]:
        """Return the children of the job with bounded times. `behind`: time by which the children may be older than
        `now`. `last_reports`: returns the pods' reports; called only if a trainer container has ended."""
        known = self._jobs.get(job, _LastPass())
        last, requested = max(now - behind, known.last or now - behind), _requested_at(status)
        if known.given and known.given[0] is pods and known.given[1:] == (tuple(jobs), requested):
            # The same pods, as the memory returns them while nothing changes: no pod is looked at.
            known.time, known.last = now, last
            return known.bounded
        # Only present children are stored again, so deleted children are forgotten.
        observed, dated_jobs = _LastPass(now, last, given=(pods, tuple(jobs), requested)), []
        # A pod that reported had not ended. Its report is the operator's own observation, whatever the memory lacks.
        alive_at = {one.pod: one.last for one in last_reports()} if pods.terminated else {}
        for one in jobs:
            child = known.child(known.jobs.get(one.name), now)
            observed.jobs[one.name] = child.fields
            dated_jobs.append(_bound_job_times(one, child))
        for execution, members in pods.by_execution.items():
            earliest = requested if execution.number == status.execution else None
            for pod in members:
                same = known.pods.get(pod.name)
                if same is None or same.given is not pod or same.earliest != earliest:
                    child = known.child(same.fields if same else None, now)
                    bounded = _bound_pod_times(pod, child, earliest, alive_at.get(pod.name))
                    same = _BoundedPod(pod, earliest, child.fields, bounded)
                observed.pods[pod.name] = same
        observed.bounded = dated_jobs, Pods(pod.bounded for pod in observed.pods.values())
        self._jobs[job] = observed
        return observed.bounded


def _bound_job_times(job: ChildJob, child: _Child) -> ChildJob:
    return replace(
        job,
        ended=child.bounded("ended", job.ended),
        held=child.bounded("held", job.held),
        admitted=child.bounded("admitted", job.admitted),
        start_time=child.bounded("startTime", job.start_time),
    )


def _bound_pod_times(pod: Pod, child: _Child, requested: datetime | None, alive_at: datetime | None) -> Pod:
    started, leaves = child.bounded("started", pod.started, requested), child.bounded_end(pod)
    if (started, leaves) != (pod.started, pod.deletion_deadline):
        pod = replace(pod, started=started, deletion_deadline=leaves)
    if pod.phase is PodPhase.FAILED and not (pod.termination and pod.termination.finished):
        return replace(pod, ended=clock.to_text(child.field("failed", "").first))
    reported = pod.termination.finished if pod.termination else None
    finished = child.bounded("finished", reported, requested, without=alive_at) or ""
    if pod.termination is None or finished == pod.termination.finished:
        return pod
    return replace(pod, termination=replace(pod.termination, finished=finished))


def _requested_at(status: PseudoRealJobStatus) -> datetime | None:
    """Return the time at which the pods of the newest execution were requested: a lower bound for all of their times;
    None if the status does not have this time."""
    return clock.from_text(status.execution_time) if status.execution_time else None


def _latest(*moments: datetime | None) -> datetime | None:
    return max((moment for moment in moments if moment), default=None)


def _between(reported: str, earliest: datetime | None, latest: datetime) -> str:
    moment = clock.from_text(reported)
    bounded = min(latest, max(moment, earliest) if earliest else moment)
    return reported if bounded == moment else clock.to_text(bounded)

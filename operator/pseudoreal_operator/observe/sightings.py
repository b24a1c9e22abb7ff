"""Times that other machines report, bounded by what the operator itself has observed. In memory only.

A node reports when a container ended, the API server when the grace period of a deleted pod ends, the Job controller
when a Job ended. The clocks of these machines may be hours off. A value that a pass finds for the first time was set
before that pass, and after the last pass that did not find it. Without such passes, as after the operator's start,
reported times are trusted.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import NamedTuple

from pseudoreal_api.status.status import PseudoRealJobStatus

from pseudoreal_operator import clock
from pseudoreal_operator.observe.report_store import JobKey
from pseudoreal_operator.observe.view import NO_PODS, ChildJob, Pod, PodPhase, Pods


@dataclass(frozen=True, slots=True)
class _Field:
    """Value of one field of a child, and the passes between which it appeared."""

    reported: str
    first: datetime
    """Time of the first pass that found the value."""
    before: datetime | None
    """Time of the previous pass, if that pass found the child without the value; else None."""


@dataclass(slots=True)
class _Child:
    """One child in the pass at `now`; `before`: time of the previous pass, if that pass found the child."""

    now: datetime
    before: datetime | None
    fields: dict[str, _Field]

    def field(self, name: str, reported: str) -> _Field:
        known = self.fields.get(name)
        if known is None or known.reported != reported:
            known = self.fields[name] = _Field(reported, self.now, self.before)
        return known

    def bounded(self, name: str, reported: str | None, earliest: datetime | None = None) -> str | None:
        """Return the reported time, bounded. Upper bound: the first pass that found the time. Lower bounds: `earliest`,
        and the pass before the first one. None if there is no reported time."""
        found = self.field(name, reported or "")
        if not reported:
            return reported
        known = [moment for moment in (earliest, found.before) if moment]
        return _between(reported, max(known, default=None), found.first)

    def bounded_end(self, pod: Pod) -> str | None:
        """Return the deletion deadline of a pod, bounded: its grace period started between two passes. None if the pod
        is not being deleted."""
        found = self.field("leaves", pod.deletion_deadline or "")
        if not pod.deletion_deadline or pod.grace_seconds is None:
            return pod.deletion_deadline
        grace = timedelta(seconds=pod.grace_seconds)
        return _between(pod.deletion_deadline, found.before + grace if found.before else None, found.first + grace)


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
    ) -> tuple[list[ChildJob], Pods]:
        """Return the children of the job with bounded times. `behind`: time by which the children may be older than
        `now`."""
        known = self._jobs.get(job, _LastPass())
        last, requested = max(now - behind, known.last or now - behind), _requested_at(status)
        if known.given and known.given[0] is pods and known.given[1:] == (tuple(jobs), requested):
            # The same pods, as the memory returns them while nothing changes: no pod is looked at.
            known.last = last
            return known.bounded
        # Only present children are stored again, so deleted children are forgotten.
        observed, dated_jobs = _LastPass(last, given=(pods, tuple(jobs), requested)), []
        for one in jobs:
            before = known.last if one.name in known.jobs else None
            child = _Child(now, before, known.jobs.get(one.name, {}))
            observed.jobs[one.name] = child.fields
            dated_jobs.append(_bound_job_times(one, child))
        for execution, members in pods.by_execution.items():
            earliest = requested if execution.number == status.execution else None
            for pod in members:
                same = known.pods.get(pod.name)
                if same is None or same.given is not pod or same.earliest != earliest:
                    child = _Child(now, known.last if same else None, same.fields if same else {})
                    same = _BoundedPod(pod, earliest, child.fields, _bound_pod_times(pod, child, earliest))
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


def _bound_pod_times(pod: Pod, child: _Child, requested: datetime | None) -> Pod:
    started, leaves = child.bounded("started", pod.started, requested), child.bounded_end(pod)
    if (started, leaves) != (pod.started, pod.deletion_deadline):
        pod = replace(pod, started=started, deletion_deadline=leaves)
    if pod.phase is PodPhase.FAILED and not (pod.termination and pod.termination.finished):
        return replace(pod, ended=clock.to_text(child.field("failed", "").first))
    finished = child.bounded("finished", pod.termination.finished if pod.termination else None, requested) or ""
    if pod.termination is None or finished == pod.termination.finished:
        return pod
    return replace(pod, termination=replace(pod.termination, finished=finished))


def _requested_at(status: PseudoRealJobStatus) -> datetime | None:
    """Return the time at which the pods of the newest execution were requested: a lower bound for all of their times;
    None if the status does not have this time."""
    return clock.from_text(status.execution_time) if status.execution_time else None


def _between(reported: str, earliest: datetime | None, latest: datetime) -> str:
    moment = clock.from_text(reported)
    bounded = min(latest, max(moment, earliest) if earliest else moment)
    return reported if bounded == moment else clock.to_text(bounded)

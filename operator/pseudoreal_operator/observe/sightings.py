"""Times that other machines report, bounded by what the operator itself has observed. In memory only.

A node reports when a container ended, the API server when the grace period of a deleted pod ends, the Job controller
when a Job ended. The clocks of these machines may be hours off. A value that a pass finds for the first time was set
before that pass, and after the last pass that did not find it. Without such passes, as after the operator's start,
reported times are trusted.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from pseudoreal_api.status.status import PseudoRealJobStatus

from pseudoreal_operator import clock
from pseudoreal_operator.observe.report_store import JobKey
from pseudoreal_operator.observe.view import ChildJob, Pod, PodPhase


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


@dataclass
class _LastPass:
    """The last pass over the children of a job."""

    last: datetime | None = None
    """Latest time at which the children, as the passes know them, were up to date."""
    children: dict[str, dict[str, _Field]] = field(default_factory=dict)
    """Name of a child -> its fields; a pod and a Job never share a name."""
    given: tuple[Sequence[Pod], tuple[ChildJob, ...], datetime | None] | None = None
    """Pods and Jobs before they were bounded, and the time at which the newest pods were requested."""
    bounded: tuple[list[ChildJob], tuple[Pod, ...]] = ([], ())
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
        pods: Sequence[Pod],
        now: datetime,
        behind: timedelta = timedelta(0),
    ) -> tuple[list[ChildJob], tuple[Pod, ...]]:
        """Return the children of the job with bounded times. `behind`: time by which the children may be older than
        `now`."""
        known = self._jobs.get(job, _LastPass())
        last, requested = max(now - behind, known.last or now - behind), _requested_at(status)
        if known.given and known.given[0] is pods and known.given[1:] == (tuple(jobs), requested):
            # The same tuple of pods, as the memory returns it while nothing changes: no pod is looked at.
            known.last = last
            return known.bounded
        # Only present children are stored again, so deleted children are forgotten.
        observed = self._jobs[job] = _LastPass(last, given=(pods, tuple(jobs), requested))

        def child(name: str) -> _Child:
            before = known.last if name in known.children else None
            fields = observed.children[name] = known.children.get(name, {})
            return _Child(now, before, fields)

        dated_jobs = [_bound_job_times(one, child(one.name)) for one in jobs]
        dated_pods = tuple(
            _bound_pod_times(pod, child(pod.name), requested if pod.execution.number == status.execution else None)
            for pod in pods
        )
        observed.bounded = dated_jobs, dated_pods
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

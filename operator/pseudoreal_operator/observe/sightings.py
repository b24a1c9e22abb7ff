"""Times that other machines report, bounded by what the operator itself has observed. In memory only.

A node reports when a container ended, the API server when a pod is to be gone, the Job controller when a Job ended.
Their clocks may be hours off. A value that a pass finds for the first time was set before that pass, and after the last
pass that did not find it. Without such passes, as after the operator's start, reported times are believed.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from pseudoreal_api.status.status import PseudoRealJobStatus

from pseudoreal_operator import clock
from pseudoreal_operator.observe.report_store import JobKey
from pseudoreal_operator.observe.view import ChildJob, Pod, PodPhase


@dataclass(frozen=True, slots=True)
class _Field:
    """Value of one field of a child, and the passes between which it appeared."""

    told: str
    first: datetime
    """Time of the first pass that found it."""
    before: datetime | None
    """Time of the pass before that one; None: there was none."""


@dataclass(slots=True)
class _Child:
    """One child in the pass at `now`; `before`: time of the previous pass, if that pass found the child."""

    now: datetime
    before: datetime | None
    fields: dict[str, _Field]

    def field(self, name: str, told: str) -> _Field:
        known = self.fields.get(name)
        if known is None or known.told != told:
            known = self.fields[name] = _Field(told, self.now, self.before)
        return known

    def bounded(self, name: str, told: str | None, earliest: datetime | None = None) -> str | None:
        """Return the reported time, but no later than the first pass that found it, and no earlier than `earliest`
        or the pass before that one."""
        found = self.field(name, told or "")
        if not told:
            return told
        known = [moment for moment in (earliest, found.before) if moment]
        return _between(told, max(known, default=None), found.first)

    def bounded_end(self, pod: Pod) -> str | None:
        """Return the bounded time by which a pod that is deleted is to be gone. Its grace period began between two
        passes as well."""
        found = self.field("leaves", pod.leaves_by or "")
        if not pod.leaves_by or pod.grace_seconds is None:
            return pod.leaves_by
        grace = timedelta(seconds=pod.grace_seconds)
        return _between(pod.leaves_by, found.before + grace if found.before else None, found.first + grace)


@dataclass
class _Seen:
    """The last pass over the children of a job."""

    last: datetime | None = None
    children: dict[str, dict[str, _Field]] = field(default_factory=dict)
    """Name of a child -> its fields; a pod and a Job never share a name."""


class Sightings:
    """Passes in which the children of each job first reported each time."""

    def __init__(self) -> None:
        self._jobs: dict[JobKey, _Seen] = {}

    def forget(self, job: JobKey) -> None:
        self._jobs.pop(job, None)

    def dated(
        self,
        job: JobKey,
        status: PseudoRealJobStatus,
        jobs: Iterable[ChildJob],
        pods: Iterable[Pod],
        now: datetime,
    ) -> tuple[list[ChildJob], list[Pod]]:
        """Return the children of the job with bounded times."""
        known = self._jobs.get(job, _Seen())
        # Only present children are stored again, so deleted ones are forgotten.
        observed = self._jobs[job] = _Seen(last=now)

        def child(name: str) -> _Child:
            before = known.last if name in known.children else None
            fields = observed.children[name] = known.children.get(name, {})
            return _Child(now, before, fields)

        dated_jobs = [_dated_job(one, child(one.name)) for one in jobs]
        dated_pods = [_dated_pod(pod, child(pod.name), _asked(status, pod)) for pod in pods]
        return dated_jobs, dated_pods


def _dated_job(job: ChildJob, child: _Child) -> ChildJob:
    return replace(
        job,
        ended=child.bounded("ended", job.ended),
        held=child.bounded("held", job.held),
        admitted=child.bounded("admitted", job.admitted),
        begun=child.bounded("begun", job.begun),
    )


def _dated_pod(pod: Pod, child: _Child, asked: datetime | None) -> Pod:
    started, leaves = child.bounded("started", pod.started, asked), child.bounded_end(pod)
    if (started, leaves) != (pod.started, pod.leaves_by):
        pod = replace(pod, started=started, leaves_by=leaves)
    if pod.phase is PodPhase.FAILED and not (pod.termination and pod.termination.finished):
        return replace(pod, ended=clock.to_text(child.field("failed", "").first))
    finished = child.bounded("finished", pod.termination.finished if pod.termination else None, asked) or ""
    if pod.termination is None or finished == pod.termination.finished:
        return pod
    return replace(pod, termination=replace(pod.termination, finished=finished))


def _asked(status: PseudoRealJobStatus, pod: Pod) -> datetime | None:
    """Return when the pod was requested, a lower bound for all of its times; None if the status does not have it."""
    is_newest = pod.execution.number == status.execution and status.execution_time
    return clock.from_text(status.execution_time) if is_newest and status.execution_time else None


def _between(told: str, earliest: datetime | None, latest: datetime) -> str:
    moment = clock.from_text(told)
    bounded = min(latest, max(moment, earliest) if earliest else moment)
    return told if bounded == moment else clock.to_text(bounded)

"""Moments that other machines tell, bounded by what the operator itself has seen. In memory only.

A node tells when a container ended, the API server when a pod is to be gone, the Job controller when a Job ended. Their
clocks may be hours off. What a look finds for the first time happened before that look, and after the last look that
did not find it. Where the operator has no such looks, as after its start, it believes what it is told.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from pseudoreal_api.status.status import PseudoRealJobStatus

from pseudoreal_operator import clock
from pseudoreal_operator.observe.board import JobKey
from pseudoreal_operator.observe.view import ChildJob, Pod, PodPhase


@dataclass(frozen=True)
class _Look:
    """Looks that found one field of a child as it is."""

    told: str
    first: datetime
    last: datetime
    before: datetime | None = None
    """The last look that found the field otherwise; None: there was none."""


@dataclass
class _Looks:
    """Looks at one child, by field."""

    fields: dict[str, _Look] = field(default_factory=dict)

    def at(self, name: str, told: str, now: datetime) -> _Look:
        """Return the looks that found the field as it is now."""
        known = self.fields.get(name)
        if known is None:
            known = _Look(told, now, now)
        elif known.told != told:
            known = _Look(told, now, now, before=known.last)
        self.fields[name] = replace(known, last=now)
        return self.fields[name]

    def bounded(self, name: str, told: str | None, now: datetime, earliest: datetime | None = None) -> str | None:
        """Return the moment that is told, no later than the first look that found it, and no earlier than `earliest` or
        the last look before that."""
        look = self.at(name, told or "", now)
        known = [moment for moment in (earliest, look.before) if moment]
        return _between(told, max(known, default=None), look.first) if told else told

    def bounded_end(self, pod: Pod, now: datetime) -> str | None:
        """Return by when a pod that is deleted is to be gone. Its grace period began between two looks as well."""
        look = self.at("leaves", pod.leaves_by or "", now)
        if not pod.leaves_by or pod.grace_seconds is None:
            return pod.leaves_by
        grace = timedelta(seconds=pod.grace_seconds)
        return _between(pod.leaves_by, look.before + grace if look.before else None, look.first + grace)


class Sightings:
    """When the children of each job were first seen to tell a moment."""

    def __init__(self) -> None:
        self._jobs: dict[JobKey, dict[str, _Looks]] = {}

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
        """Return the children of the job with bounded moments."""
        before = self._jobs.get(job, {})
        # Children that are gone are forgotten.
        after = self._jobs[job] = {}
        dated_jobs, dated_pods = [], []
        for one in jobs:
            looks = after[f"job/{one.name}"] = before.get(f"job/{one.name}", _Looks())
            dated_jobs.append(_dated_job(one, looks, now))
        for pod in pods:
            looks = after[pod.name] = before.get(pod.name, _Looks())
            dated_pods.append(_dated_pod(pod, looks, _asked(status, pod), now))
        return dated_jobs, dated_pods


def _dated_job(job: ChildJob, looks: _Looks, now: datetime) -> ChildJob:
    return replace(
        job,
        ended=looks.bounded("ended", job.ended, now),
        held=looks.bounded("held", job.held, now),
        admitted=looks.bounded("admitted", job.admitted, now),
        begun=looks.bounded("begun", job.begun, now),
    )


def _dated_pod(pod: Pod, looks: _Looks, asked: datetime | None, now: datetime) -> Pod:
    pod = replace(pod, started=looks.bounded("started", pod.started, now, asked), leaves_by=looks.bounded_end(pod, now))
    if pod.phase is PodPhase.FAILED and not (pod.termination and pod.termination.finished):
        return replace(pod, ended=clock.to_text(looks.at("failed", "", now).first))
    if pod.termination is None:
        looks.bounded("finished", None, now)
        return pod
    finished = looks.bounded("finished", pod.termination.finished, now, asked)
    return replace(pod, termination=replace(pod.termination, finished=finished or ""))


def _asked(status: PseudoRealJobStatus, pod: Pod) -> datetime | None:
    """Return when the pod was asked for, if the status has that: nothing of it is earlier."""
    is_newest = pod.execution.number == status.execution and status.execution_time
    return clock.from_text(status.execution_time) if is_newest and status.execution_time else None


def _between(told: str, earliest: datetime | None, latest: datetime) -> str:
    moment = clock.from_text(told)
    bounded = min(latest, max(moment, earliest) if earliest else moment)
    return told if bounded == moment else clock.to_text(bounded)

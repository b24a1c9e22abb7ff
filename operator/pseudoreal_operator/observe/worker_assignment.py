"""Worker assignment: worker N is the pod with completion index N, unless a spare pod has replaced it. Pure.

All other code knows pods by their worker indices, and never takes a waiting spare pod for a worker.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from math import inf
from operator import attrgetter
from typing import TypeVar

from pseudoreal_api.resolved.cache import cache_per_object
from pseudoreal_api.status.status import PseudoRealJobStatus
from pseudoreal_api.wire.reports import Membership, Takeover

from pseudoreal_operator.observe.report_store import QUIET_SECONDS
from pseudoreal_operator.observe.stages import Execution, StageKind
from pseudoreal_operator.observe.view import LastReport, Observed, Pod, PodPhase, Pods, View

_Numbered = TypeVar("_Numbered", Pod, LastReport)


def memberships(status: PseudoRealJobStatus) -> dict[Execution, Membership]:
    """Return the memberships that the status records. In all other executions, worker N is the pod with completion
    index N."""
    known = status.spares
    if known is None:
        return {}
    taken = [Takeover(worker=place.worker, pod=place.pod) for place in known.places]
    membership = Membership(restart=known.restart, own_restarts=known.own_restarts, takeovers=taken)
    return {Execution(known.phase_name, StageKind.TRAIN, known.execution): membership}


def with_worker_indices(observed: Observed) -> Observed:
    """Return the observation with worker indices as `index`; pods that are not workers are listed separately. Call it
    only once: in `observed`, as read from the API server and from reports, `index` is the completion index."""
    assignment = _Assignment(memberships(observed.status), _workers(observed))
    workers, others = assignment.split(observed.pods)
    reports, used = assignment.reports_of_workers(observed.last_reports), _used_pods(observed) if others else set()
    idle = {pod.name for pod in others if pod.index >= assignment.workers[pod.execution]} - used
    return replace(
        observed,
        pods=workers,
        spares=Pods(pod for pod in others if pod.name in idle),
        replaced=Pods(pod for pod in others if pod.name not in idle),
        last_reports=reports,
        non_worker_reports=tuple(
            one for one in observed.last_reports if assignment.worker(one.execution, one.index) is None
        )
        if len(reports) < len(observed.last_reports)
        else (),
        deleted_pods=tuple(assignment.only_workers(observed.deleted_pods)),
    )


def _used_pods(observed: Observed) -> set[str]:
    """Return the names of pods that have been workers, as far as reports and faults tell: a spare pod that took a place
    and lost it is no spare pod any more."""
    ranked = {one.pod for one in observed.last_reports if one.report.ranks or one.report.in_place}
    return ranked | {fault.pod for fault in observed.status.faults if fault.pod and fault.restart_in_place is not None}


def worker_of(status: PseudoRealJobStatus, pod: Pod) -> int | None:
    """Return the worker index of a pod whose `index` is still its completion index; None: the pod is not a worker."""
    return _Assignment(memberships(status), {pod.execution: pod.workers} if pod.workers else {}).worker(
        pod.execution, pod.index
    )


def ready_spares(observed: Observed, execution: Execution, now: datetime) -> list[Pod]:
    """Return the running spare pods of the execution that report. A spare pod learns of a takeover from the answer to
    its report."""
    reporting = {one.pod for one in observed.non_worker_reports if (now - one.last).total_seconds() <= QUIET_SECONDS}
    own = (pod for pod in observed.spares if pod.execution == execution and pod.name in reporting)
    ready = (
        pod for pod in own if pod.phase is PodPhase.RUNNING and pod.deletion_deadline is None and pod.disruption is None
    )
    return sorted(ready, key=lambda pod: pod.index)


@cache_per_object
def reports_of_members(view: View) -> list[LastReport]:
    """Return the reports of the present execution's pods that still exist and have begun the present membership. A
    report from before says nothing about the members of now: the clocks of a hang start from zero with them."""
    membership = memberships(view.status).get(view.execution)
    if membership is None:
        return view.reporting
    return [one for one in view.reporting if one.restarts_in_place >= membership.restart]


@dataclass(frozen=True)
class _Assignment:
    members: dict[Execution, Membership]
    workers: dict[Execution, int]
    """Execution -> number of workers, if known."""

    def worker(self, execution: Execution, index: int) -> int | None:
        """Return the worker index of the pod with this completion index; None: the pod is not a worker."""
        workers, membership = self.workers.get(execution, inf), self.members.get(execution)
        if membership is not None:
            return membership.worker_of(index, workers)
        return index if index < workers else None

    def split(self, pods: Pods) -> tuple[Pods, list[Pod]]:
        """Return the workers' pods, and the other pods. Ordinary pods are returned as they are: the same object."""
        executions = pods.by_execution.items()
        if all(members[-1].index < self._unchanged_below(execution) for execution, members in executions):
            return pods, []
        others = [pod for pod in pods if self.worker(pod.execution, pod.index) is None]
        return Pods(self.only_workers(pods)), others

    def reports_of_workers(self, reports: tuple[LastReport, ...]) -> tuple[LastReport, ...]:
        workers = min(map(self._unchanged_below, {one.execution for one in reports}), default=0)
        if max(map(attrgetter("index"), reports), default=-1) < workers:
            return reports
        return tuple(self.only_workers(reports))

    def only_workers(self, numbered: Iterable[_Numbered]) -> Iterator[_Numbered]:
        execution, workers = None, inf
        for one in numbered:
            if one.execution is not execution:  # thousands of pods share one execution
                execution, workers = one.execution, self._unchanged_below(one.execution)
            if one.index < workers:
                yield one
            elif (worker := self.worker(one.execution, one.index)) is not None:
                yield one if worker == one.index else replace(one, index=worker)

    def _unchanged_below(self, execution: Execution) -> float:
        """Return the completion index below which every pod of the execution is the worker of that index."""
        return 0 if execution in self.members else self.workers.get(execution, inf)


def _workers(observed: Observed) -> dict[Execution, int]:
    executions = observed.pods.by_execution.items()
    known = {execution: pods[0].workers for execution, pods in executions if pods[0].workers}
    return known | {job.execution: job.workers for job in observed.jobs if job.workers}

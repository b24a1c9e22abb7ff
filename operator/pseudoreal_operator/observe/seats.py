"""Which pods of an execution are its workers: those of the workers' numbers, unless a spare pod took a place. Pure.

Everything else knows pods by the numbers of their workers, and never sees a spare pod that waits as one of them.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from math import inf
from typing import TypeVar

from pseudoreal_api.status.status import PseudoRealJobStatus
from pseudoreal_api.wire.reports import Membership, Takeover

from pseudoreal_operator.observe.board import QUIET_SECONDS
from pseudoreal_operator.observe.stages import Execution, StageKind
from pseudoreal_operator.observe.view import Heard, Observed, Pod, PodPhase

_Numbered = TypeVar("_Numbered", Pod, Heard)


def memberships(status: PseudoRealJobStatus) -> dict[Execution, Membership]:
    """What the status says of the workers of executions; of others, each worker is the pod of its number."""
    known = status.spares
    if known is None:
        return {}
    taken = [Takeover(worker=place.worker, pod=place.pod) for place in known.places]
    membership = Membership(restart=known.restart, own_restarts=known.own_restarts, takeovers=taken)
    return {Execution(known.phase_name, StageKind.TRAIN, known.execution): membership}


def seated(seen: Observed) -> Observed:
    """What was seen, with `index` as the number of the worker; pods that are none stand apart. To be called once: the
    API server and the pods' reports number pods by their completion indices."""
    seats = _Seats(memberships(seen.status), _workers(seen))
    apart = [pod for pod in seen.pods if seats.worker(pod.execution, pod.index) is None]
    return replace(
        seen,
        pods=tuple(seats.only_workers(seen.pods)),
        spares=tuple(pod for pod in apart if pod.index >= seats.workers[pod.execution]),
        replaced=tuple(pod for pod in apart if pod.index < seats.workers[pod.execution]),
        heard=tuple(seats.only_workers(seen.heard)),
        heard_apart=tuple(one for one in seen.heard if seats.worker(one.execution, one.index) is None),
        gone=tuple(seats.only_workers(seen.gone)),
    )


def worker_of(status: PseudoRealJobStatus, pod: Pod) -> int | None:
    """Number of the worker that a pod is whose `index` is still its completion index; None: of none."""
    return _Seats(memberships(status), {pod.execution: pod.workers} if pod.workers else {}).worker(
        pod.execution, pod.index
    )


def ready_spares(seen: Observed, execution: Execution, now: datetime) -> list[Pod]:
    """Spare pods of the execution that wait and can be told of a place, which they hear as they report."""
    speak = {one.pod for one in seen.heard_apart if (now - one.last).total_seconds() <= QUIET_SECONDS}
    own = (pod for pod in seen.spares if pod.execution == execution and pod.name in speak)
    ready = (pod for pod in own if pod.phase is PodPhase.RUNNING and pod.leaves_by is None and pod.disruption is None)
    return sorted(ready, key=lambda pod: pod.index)


@dataclass(frozen=True)
class _Seats:
    members: dict[Execution, Membership]
    workers: dict[Execution, int]
    """Number of workers of each execution of which it is known."""

    def worker(self, execution: Execution, index: int) -> int | None:
        """Number of the worker that the pod of a completion index is; None: of none."""
        workers, membership = self.workers.get(execution, inf), self.members.get(execution)
        if membership is not None:
            return membership.worker_of(index, workers)
        return index if index < workers else None

    def only_workers(self, those: Iterable[_Numbered]) -> Iterator[_Numbered]:
        for one in those:
            if (worker := self.worker(one.execution, one.index)) is not None:
                yield one if worker == one.index else replace(one, index=worker)


def _workers(seen: Observed) -> dict[Execution, int]:
    told = {pod.execution: pod.workers for pod in seen.pods if pod.workers}
    return told | {job.execution: job.workers for job in seen.jobs if job.workers}

"""Membership: which pod has which worker's place, by a number that only grows. Pure.

The number of a membership has two parts: the execution, and the restart in place with which the membership begins. The
second part is 0 at the start of an execution, when worker N is pod N. Every change of an execution's pods is a change
of this list:

| change | number | members |
| --- | --- | --- |
| restart in place | the same; the restart has the next number | the same pods |
| a spare pod takes over | the execution, and a restart that is new to every pod | another pod in each lost place |
| a queue takes the pods back and admits them again | the same | other pods in the same places |
| another execution, elastic phases included | the next execution, 0 | all new, fewer or more |

The first two keep the execution, and their number is the restart's. Pods restart in place without asking (`in_place`
counts these restarts); all other changes are the operator's (`recovery`), and are in the status before any pod is told
or created. So no two lists are ever sent under one number, even if the operator dies in between.

**The fence.** Address, name and key of a rendezvous follow from the number, so pods meet only pods of the same list.
Ranks commit under their number (trainer, `checkpoint/fence.py`), and a commit under a smaller one fails: a pod that has
lost its place, and still runs unseen, can do no harm.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta

from pseudoreal_api.status.status import PseudoRealJobStatus, RestartsInPlace, Spares, TakenPlace

from pseudoreal_operator.changes import status_with
from pseudoreal_operator.failures.classify import allowed_restarts_in_place
from pseudoreal_operator.lifecycle.clocks import JOIN_SECONDS, is_stuck
from pseudoreal_operator.lifecycle.deadlines import have_all_started
from pseudoreal_operator.observe.view import LastReport, Pod, View
from pseudoreal_operator.observe.worker_assignment import memberships


def counted_restarts(view: View) -> int:
    """Return the highest restart number of the present execution that is counted already, or with which a membership
    begins; 0 if there is none."""
    places = memberships(view.status).get(view.execution)
    return max(places.restart if places else 0, known.restarts if (known := known_restarts_in_place(view)) else 0)


def known_restarts_in_place(view: View) -> RestartsInPlace | None:
    known = view.status.restarts_in_place
    is_this = known and (known.phase, known.execution) == (view.execution.phase, view.execution.number)
    return known if is_this else None


def own_restarts(view: View) -> int:
    """Return the number of faults that the present execution survived under a restart number."""
    number = view.execution.number
    return sum(fault.execution == number and fault.restart_in_place is not None for fault in view.status.faults)


def next_restart(view: View) -> int:
    """Return a restart number that no pod has reached yet: pods that had already restarted under the number would not
    notice the new members. A waiting pod is at the number that it reported; a training pod may be one further without
    having reported it."""
    return 1 + max([counted_restarts(view), *map(_restart_reached, view.last_reports)])


def _restart_reached(last_report: LastReport) -> int:
    known = last_report.report.in_place.restarts if last_report.report.in_place else 0
    return known if last_report.waits_to_restart else known + 1


@dataclass(frozen=True)
class LostWorkers:
    """Workers whose pods cannot train on."""

    numbers: tuple[int, ...]
    stuck: Pod | None = None
    """A stuck pod among the lost pods, for instance on a node that is off; None: no pod is stuck."""
    late: tuple[int, ...] = ()
    """Members of `numbers` whose pods exist and report, but have not begun the present membership in time."""


def find_lost_workers(view: View) -> LostWorkers:
    """Return the workers with missing, failed or stuck pods. If there are any, also return each worker whose pod was
    told of the present membership over JOIN_SECONDS ago and has not begun it: the lost pods may have waited for this
    pod. Until all workers have met, a missing pod does not count as lost, but as yet to be created."""
    stuck = [pod for pod in view.pods.leaving if is_stuck(pod, view.now)]
    missing = view.missing_workers if have_all_started(view) else []
    lost = {*missing, *(pod.index for pod in (*view.pods.failed, *stuck))}
    late = set[int]()
    if lost and (present := memberships(view.status).get(view.execution)):
        limit = view.now - timedelta(seconds=JOIN_SECONDS)
        told = ((one.index, one.told_membership) for one in view.reporting if one.told_membership)
        late = {index for index, (restart, since) in told if restart == present.restart and since < limit} - lost
    return LostWorkers(tuple(sorted(lost | late)), next(iter(stuck), None), tuple(sorted(late)))


def with_new_members(
    view: View, status: PseudoRealJobStatus, takeovers: Mapping[int, Pod], restart: int, message: str
) -> PseudoRealJobStatus:
    """Return the status with the membership that begins with `restart`. `takeovers`: worker -> spare pod in its
    place."""
    allowed = allowed_restarts_in_place(view.spec.restart, status)
    members = Spares(
        phase_name=view.execution.phase,
        execution=view.execution.number,
        restart=restart,
        own_restarts=max(0, min(allowed, view.spec.restart.in_place - own_restarts(view))),
        places=list(_places(view, takeovers)),
        message=message[:1024],
    )
    return status_with(status, spares=members)


def _places(view: View, takeovers: Mapping[int, Pod]) -> Iterator[TakenPlace]:
    """Yield the places of the whole list, with earlier takeovers: the status keeps one list per execution."""
    before = memberships(view.status).get(view.execution)
    pods = {one.worker: one.pod for one in before.takeovers} if before else {}
    pods |= {worker: pod.index for worker, pod in takeovers.items()}
    yield from (TakenPlace(worker=worker, pod=pod) for worker, pod in sorted(pods.items()))

"""Decides whether a plan from memory may be carried out without reading the API server. Pure.

The memory may be out of date, for Jobs and pods by different times: it may show the end of a Job before the end of its
pods. So a plan from memory may change only fields that a later pass corrects: counts, progress, and the reason why a
job does or does not progress. Everything that cannot be undone is planned again from objects read from the API server:
a fault that counts, an execution, the end of a job, the creation, stop or deletion of a child, and an event.
"""

from dataclasses import replace

from pseudoreal_api.status.status import Condition, PseudoRealJobStatus

from pseudoreal_operator.changes import status_with
from pseudoreal_operator.lifecycle.plan import Plan
from pseudoreal_operator.status.conditions import is_true


def is_routine(wanted: Plan, stored: PseudoRealJobStatus) -> bool:
    """Return whether the plan changes nothing but fields of the status that later passes correct. `stored`: the status
    in the API server."""
    if replace(wanted, status=stored, requeue_after=None) != Plan(stored):
        return False
    new = wanted.status
    kept = status_with(
        stored,
        replicas=new.replicas,
        progress=new.progress,
        checkpoint=new.checkpoint,
        placement=new.placement,
        conditions=new.conditions,
    )
    return new == kept and _without_progressing(new) == _without_progressing(stored)


def _without_progressing(status: PseudoRealJobStatus) -> list[Condition]:
    return [condition for condition in status.conditions if condition.type != "Progressing"]


def rests_on_successes(wanted: Plan, stored: PseudoRealJobStatus) -> bool:
    """Return whether the plan only records that stages were done. A Job stays complete and a pod's result stays its
    result, so the pods may be those that the watches have told: nothing newer could change the plan."""
    new = wanted.status
    if wanted.stop or wanted.fail_jobs or wanted.delete or wanted.apply or wanted.dry_run or wanted.expire:
        return False
    if is_true(new, "Failed"):
        return False
    same = (
        new.execution,
        new.restarts,
        new.retries,
        new.faults,
        new.disruptions,
        new.restarts_in_place,
        new.spares,
    ) == (
        stored.execution,
        stored.restarts,
        stored.retries,
        stored.faults,
        stored.disruptions,
        stored.restarts_in_place,
        stored.spares,
    )
    return same and _done(new) > _done(stored)


def _done(status: PseudoRealJobStatus) -> int:
    return sum((phase.state == "Complete") + (phase.start_checkpoint is not None) for phase in status.phases)

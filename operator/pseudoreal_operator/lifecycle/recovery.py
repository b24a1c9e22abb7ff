"""Recovery: one table says which remedies help against which trouble of an execution's members. Pure.

`recover` tries the remedies of a row in order; the first that is available decides. A remedy that changes less stands
before one that changes more: the same pods restart their ranks, one pod is replaced, the phase gets another size, all
pods are new. Pods restart in place without asking, so the table has no row for the death of a process: if that restart
fails, the operator sees lost workers or a failed Job.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from pseudoreal_api.wire.messages import MOST_RESTART

from pseudoreal_operator.failures import results
from pseudoreal_operator.lifecycle.decisions import (
    Cause,
    Decision,
    avoided_node_events,
    event,
    fail,
    progressing,
    restart_or_fail,
    unposted_start_events,
    why_exhausted,
    with_failure,
    with_retry,
)
from pseudoreal_operator.lifecycle.elastic import Size, resize
from pseudoreal_operator.lifecycle.membership import next_restart, with_new_members
from pseudoreal_operator.observe.stages import StageKind, with_stage_started
from pseudoreal_operator.observe.view import Pod, View
from pseudoreal_operator.observe.worker_assignment import ready_spares
from pseudoreal_operator.status.events import Reason


class Kind(StrEnum):
    """Kind of trouble, by what the operator knows of it."""

    HANG = "Hang"
    """No step or commit in time; the pods live."""
    PEERS_WAIT = "PeersWait"
    """Workers are lost. The others wait for them, or do not notice the loss because the lost pod is stuck."""
    POD_STUCK = "PodStuck"
    """A pod that cannot be ended holds up the execution."""
    WORKER_MISSING = "WorkerMissing"
    """A pod is gone without a word, and the others wait in vain."""
    JOB_FAILED = "JobFailed"
    """All pods of the execution have ended, and some failed."""
    JOB_GONE = "JobGone"
    """The Job, or the result of its pods, is gone."""
    LATE_START = "LateStart"
    """Not all pods run in time."""
    TOO_FEW_NODES = "TooFewNodes"
    """Pods of an elastic phase wait too long for nodes, or for their queue."""
    LEFT_BEHIND = "LeftBehind"
    """Stuck pods of an earlier execution hold up the next one, of an elastic phase."""
    SMALLER = "Smaller"
    """An elastic phase has trained with fewer workers for long."""


@dataclass(frozen=True)
class Trouble:
    """Why the members of an execution cannot train together, or not as many of them as wanted."""

    kind: Kind
    cause: Cause
    is_final: bool = False
    """Whether a rule of the job, or a field of its spec, says that the job fails."""
    lost: tuple[int, ...] = ()
    """Numbers of the workers whose pods cannot train on."""
    helps_another_pod: bool = True
    """Whether another pod may succeed in the place of a lost one."""
    reason: Reason | None = None
    """Reason of an event that announces the trouble beside its consequence; None: there is no such event."""
    size: Size | None = None
    """Number of workers to go on with; None: it stays."""


Remedy = Callable[[View, Trouble], Decision | None]
"""Returns the decision; None: the remedy is not available."""


def fail_if_told(view: View, trouble: Trouble) -> Decision | None:
    """Fail the job if the user wants it for this trouble."""
    if not trouble.is_final:
        return None
    status = results.with_checkpoints(view.status, view.terminated_pods)
    return fail(view, status, trouble.cause.reason, trouble.cause.sentence)


def let_spares_take_over(view: View, trouble: Trouble) -> Decision | None:
    """Replace the pods of lost workers by spare pods. The others keep their pods, and restart their ranks in place."""
    if view.stage.kind is not StageKind.TRAIN or view.job is None or not view.job.outlives_pods:
        return None
    ready = ready_spares(view.observed, view.execution, view.now)
    if not 0 < len(trouble.lost) <= min(len(ready), view.workers - 1) or not trouble.helps_another_pod:
        return None
    if why_exhausted(view.status, view.spec.restart, view.now, counts=trouble.cause.counts):
        return None
    restart = next_restart(view)
    takeovers = dict(zip(trouble.lost, ready, strict=False))
    return _take_over(view, trouble, takeovers, restart) if restart <= MOST_RESTART else None


def _take_over(view: View, trouble: Trouble, takeovers: Mapping[int, Pod], restart: int) -> Decision:
    """Return the decision to give places of lost workers to spare pods. `takeovers`: worker -> its spare pod."""
    cause = trouble.cause
    status = results.with_reports(with_stage_started(view.status, view.stage), view.last_reports, view.now)
    status = results.with_checkpoints(status, view.terminated_pods)
    status = with_retry(with_failure(view, status, cause, restart_in_place=restart), counts=cause.counts)
    clauses = [f"spare pod {pod.name} replaces worker {worker}" for worker, pod in takeovers.items()]
    text = f"{cause.sentence} {'; '.join(clauses).capitalize()}"
    status = with_new_members(view, status, takeovers, restart, f"{text}.")
    place = f"checkpoint {status.checkpoint.latest} or a newer one" if status.checkpoint else "the newest checkpoint"
    announcement = f"{text}; all ranks start again in the remaining pods, from {place}."
    reasons = (*((trouble.reason,) if trouble.reason else ()), Reason.SPARE_TOOK_OVER)
    return Decision(
        status,
        "Training",
        progressing("SpareTookOver", announcement),
        events=(
            *unposted_start_events(view),
            *(event(view, reason, announcement, detail=str(restart)) for reason in reasons),
            *avoided_node_events(view, status),
        ),
        children=view.stage,
    )


def change_size(view: View, trouble: Trouble) -> Decision | None:
    """Start an execution with fewer or more workers, from a checkpoint that is saved now if the pods can save."""
    return None if trouble.size is None else resize(view, trouble.size)


def start_again(view: View, trouble: Trouble) -> Decision:
    """Start an execution with new pods; fail the job if spec.restart allows none."""
    return restart_or_fail(view, trouble.cause, *((trouble.reason,) if trouble.reason else ()))


REMEDIES: Mapping[Kind, tuple[Remedy, ...]] = {
    # spec.hang.action decides first. A spare pod replaces the suspect, so the others keep nodes, images and imports.
    Kind.HANG: (fail_if_told, let_spares_take_over, start_again),
    # Without enough spare pods the pods' own wait ends the execution (POD_STUCK, WORKER_MISSING, JOB_FAILED).
    Kind.PEERS_WAIT: (let_spares_take_over,),
    Kind.POD_STUCK: (fail_if_told, start_again),
    Kind.WORKER_MISSING: (fail_if_told, start_again),
    # The pods have ended, so nobody is left for a spare pod to join.
    Kind.JOB_FAILED: (fail_if_told, start_again),
    Kind.JOB_GONE: (start_again,),
    # An elastic phase has gone on with the pods that have nodes before (TOO_FEW_NODES), if it can.
    Kind.LATE_START: (fail_if_told, start_again),
    Kind.TOO_FEW_NODES: (change_size,),
    Kind.LEFT_BEHIND: (change_size,),
    Kind.SMALLER: (change_size,),
}
"""Kind of trouble -> remedies in the order in which they are tried. In a row without `start_again`, the execution goes
on waiting if no remedy is available."""


def recover(view: View, trouble: Trouble) -> Decision | None:
    """Return the decision of the first available remedy; None: the execution goes on as it is."""
    tried = (remedy(view, trouble) for remedy in REMEDIES[trouble.kind])
    return next((decision for decision in tried if decision), None)

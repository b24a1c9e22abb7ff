"""Number of workers of an elastic phase: fewer when nodes are lost or there is no room, all of them again when there
may be room. Pure.

Each change is a new execution, from a checkpoint that the pods save as they end: the number of ranks and the layout are
fixed while an execution runs. A change is not a fault, and uses up nothing of spec.restart. An attempt to get all
workers back may cost patienceSeconds of training. So the first attempt comes GROWTH times patienceSeconds after the
phase became smaller, at the earliest. After a failed attempt, the next wait is at least as long as the phase has been
smaller.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta

from pseudoreal_api.resolved.elastic import most_workers
from pseudoreal_api.spec.phase import Phase
from pseudoreal_api.status.status import Elastic, PseudoRealJobStatus

from pseudoreal_operator import clock
from pseudoreal_operator.changes import status_with
from pseudoreal_operator.lifecycle.clocks import GROWTH, STUCK_SECONDS
from pseudoreal_operator.lifecycle.deadlines import startup_deadline
from pseudoreal_operator.lifecycle.decisions import Announcement, Decision, announce
from pseudoreal_operator.observe.stages import StageKind
from pseudoreal_operator.observe.view import JobState, Pod, View
from pseudoreal_operator.status.events import Reason


@dataclass(frozen=True)
class Size:
    """Another number of workers, with which the next execution starts."""

    workers: int
    why: str
    """Reason, as a sentence without a full stop; for the full size it names the attempt."""
    abandoned: int | None = None
    """Number of the execution whose stuck pods later executions ignore; None: unchanged."""


def find_smaller_size(view: View) -> Size | None:
    """Return the size with which an elastic phase goes on that has waited too long for nodes, or for its queue."""
    moment = _patience_ends(view)
    if moment is None or view.now < moment:
        return None
    why = f"{view.placed_pods} of {view.workers} pods had a node after {_patience(view)} s"
    if _is_queued(view):
        why = f"The queue did not admit {view.workers} pods in {_patience(view)} s"
    fewer = most_workers(view.spec, view.stage.index, min(_room(view), view.workers - 1))
    return None if fewer is None else Size(fewer, why)


def find_size_without_stuck_pods(view: View) -> Size | None:
    """Return the size with which an elastic phase goes on when pods of earlier executions have been stuck for too long,
    for instance on nodes that are off. Executions must not overlap. But a stuck pod that has lost a peer can neither
    train nor save, so the next execution need not wait for its end."""
    moment, lingering = _abandon_after(view), _lingering_pods(view)
    if moment is None or view.now < moment or not _have_all_lost_peers(lingering):
        return None
    nodes = ", ".join(dict.fromkeys(pod.node or "(none)" for pod in lingering[:3]))
    why = f"{len(lingering)} of {view.workers} pods could not be ended, as node {nodes} may be lost"
    fewer = most_workers(view.spec, view.stage.index, view.workers - len(lingering))
    # Stored with the decision: later passes must not wait for these pods again.
    return None if fewer is None else Size(fewer, why, max(pod.execution.number for pod in lingering))


def find_full_size(view: View) -> Size | None:
    """Return the full size of an elastic phase that has trained with fewer workers for long enough."""
    known = view.status.elastic
    if known is None or known.grow_after is None or view.now < clock.from_text(known.grow_after):
        return None
    if not _is_elastic(view) or not _trains(view):
        return None
    number, phase = view.status.execution + 1, _phase(view)
    why = f"Execution {number} of phase {phase.name} tries {phase.workers} workers instead of {known.workers}"
    return Size(phase.workers, why)


def resize(view: View, size: Size) -> Decision:
    """Return the decision to start an execution with another number of workers."""
    abandoned = view.status.abandoned_execution if size.abandoned is None else size.abandoned
    status = status_with(view.status, abandoned_execution=abandoned)
    known, phase = status.elastic, _phase(view)
    if known is not None and size.workers == phase.workers:
        text = size.why
        elastic = known.model_copy(update={"workers": phase.workers, "grow_after": None, "message": f"{text}."})
    else:
        of = f"{size.workers} of {phase.workers} workers"
        text = f"{size.why}. Execution {status.execution + 1} of phase {phase.name} continues with {of}"
        elastic = _smaller(view, size)
    announcement = Announcement("Resized", text, (Reason.RESIZED,))
    return announce(view, status_with(status, elastic=elastic), announcement, wait=0)


def _smaller(view: View, size: Size) -> Elastic:
    phase, known = _phase(view), view.status.elastic
    since = known.since if known and known.phase_name == phase.name else clock.to_text(view.now)
    return Elastic(
        phase_name=phase.name,
        workers=size.workers,
        since=since,
        grow_after=None if view.spec.scheduling.queue else clock.to_text(_next_scale_up(view, since)),
        message=f"{size.why}.",
    )


def without_elastic_state(view: View, status: PseudoRealJobStatus) -> PseudoRealJobStatus:
    """Return the status, without `elastic` once all workers of the phase have started."""
    if status.elastic is None or not _is_elastic(view) or view.started_pods < _phase(view).workers:
        return status
    return status_with(status, elastic=None)


def is_abandoned(pod: Pod, status: PseudoRealJobStatus) -> bool:
    """Return whether later executions have stopped waiting for the pod's end."""
    return pod.deletion_deadline is not None and pod.execution.number <= (status.abandoned_execution or 0)


def elastic_moments(view: View) -> Iterator[datetime]:
    """Yield future moments at which the passage of time alone may change the number of workers."""
    if not view.status.phases:
        return
    grow_after = view.status.elastic.grow_after if view.status.elastic else None
    moments = (_patience_ends(view), _abandon_after(view), clock.from_text(grow_after) if grow_after else None)
    yield from (moment for moment in moments if moment and moment > view.now)


def scale_down_note(view: View) -> str:
    """Return a sentence on the consequence if pods stay without a node; empty if there is none."""
    moment = _patience_ends(view)
    if moment is None or moment <= view.now or most_workers(view.spec, view.stage.index, view.workers - 1) is None:
        return ""
    return (
        f" If this lasts until {clock.to_text(moment)}, the phase continues with fewer workers, if its layout"
        " allows it."
    )


def size_note(view: View) -> str:
    """Return a sentence on the size of an elastic phase with missing workers; empty for other phases."""
    known = view.status.elastic
    if known is None or not _is_elastic(view):
        return ""
    more = f" The operator tries more after {known.grow_after}." if known.grow_after else ""
    return f" It has {view.workers} of {_phase(view).workers} workers: {known.message}{more}"


def _phase(view: View) -> Phase:
    return view.spec.phases[view.stage.index]


def _is_elastic(view: View) -> bool:
    return view.stage.kind is StageKind.TRAIN and _phase(view).elastic is not None


def _patience(view: View) -> int:
    elastic, limit = _phase(view).elastic, view.spec.deadlines.startup_seconds
    assert elastic is not None, "callers have checked that the phase is elastic"
    return elastic.patience_seconds if _is_queued(view) else min(elastic.patience_seconds, limit)


def _is_queued(view: View) -> bool:
    return view.job is not None and view.job.queued


def _room(view: View) -> int:
    """Return the number of workers for which there may be room. Queues and gang scheduling place all pods or none, so
    the number of placed pods says nothing about room."""
    gives_all = _is_queued(view) or view.spec.scheduling.gang.policy != "None"
    return view.workers if gives_all else view.placed_pods


def _patience_ends(view: View) -> datetime | None:
    """Return the time at which the phase stops waiting for nodes, or for its queue; None if it waits for neither."""
    if not _is_elastic(view) or view.job is None or view.job.state is not JobState.ACTIVE:
        return None
    if view.job.queued:
        assert view.status.queued_since is not None, "with_queue sets queuedSince while a Job is queued"
        return clock.from_text(view.status.queued_since) + timedelta(seconds=_patience(view))
    if view.placed_pods >= view.workers or _were_placed(view):
        return None
    return startup_deadline(view, _patience(view))


def _were_placed(view: View) -> bool:
    """Return whether all pods of the execution had nodes before, or a pod has ended or trained: missing nodes are
    then not a lack of room."""
    known, this = view.status.placement, view.execution
    all_had = known is not None and (known.phase_name, known.execution) == (this.phase, this.number)
    return (
        all_had
        or len(view.pods.alive) < len(view.pods)
        or any(last_report.training_since for last_report in view.last_reports)
    )


def _trains(view: View) -> bool:
    begun = not view.reporting or any(last_report.training_since for last_report in view.reporting)
    return begun and view.started_pods >= view.workers and len(view.pods.alive) == len(view.pods)


def _lingering_pods(view: View) -> list[Pod]:
    """Return pods of earlier executions that have not ended and are not abandoned."""
    earlier = (pods for execution, pods in view.observed.pods.by_execution.items() if execution != view.execution)
    return [pod for pods in earlier for pod in pods.alive if not is_abandoned(pod, view.status)]


def _abandon_after(view: View) -> datetime | None:
    """Return the time at which to abandon the pods of earlier executions; None if there are no such pods, or if one of
    the pods is not being deleted."""
    lingering = _lingering_pods(view) if _is_elastic(view) else []
    times = [clock.from_text(pod.deletion_deadline) for pod in lingering if pod.deletion_deadline]
    if not lingering or len(times) < len(lingering):
        return None
    return max(times) + timedelta(seconds=STUCK_SECONDS + _patience(view))


def _have_all_lost_peers(lingering: list[Pod]) -> bool:
    alive = Counter(pod.execution for pod in lingering)
    return all(alive[pod.execution] < pod.workers for pod in lingering)


def _next_scale_up(view: View, since: str) -> datetime:
    elastic = _phase(view).elastic
    assert elastic is not None, "only elastic phases become smaller"
    return view.now + max(timedelta(seconds=GROWTH * elastic.patience_seconds), view.now - clock.from_text(since))

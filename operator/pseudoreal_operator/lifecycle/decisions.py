"""Building blocks of the rules' decisions: end the job, or announce another execution at some time, if one is allowed.
Pure.

Each restart waits longer than the previous one, unless a new checkpoint was committed between them: a job that makes
progress is disturbed as little as possible, and a job that makes none must not fill the cluster with attempts.

The number of a new execution is written to the status in the pass that decides on it (`announce`), together with the
fault and its event; a later pass creates the children. In the other order, an operator that died between the two would
leave children of a higher number: the next pass would take their execution for the present execution, and never count
the fault that ended the previous execution.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Literal
from zlib import crc32

from pseudoreal_api.names import claim_name, work_folder
from pseudoreal_api.resolved.resolve import growth_text
from pseudoreal_api.spec.recovery import Restart
from pseudoreal_api.status.status import Fault, PseudoRealJobStatus, Retries

from pseudoreal_operator import clock
from pseudoreal_operator.changes import status_with
from pseudoreal_operator.failures import results
from pseudoreal_operator.failures.classify import is_node_at_fault, is_rejected_by_node, node_fault
from pseudoreal_operator.lifecycle.stopping import sidecar_note
from pseudoreal_operator.manifests import exclusion
from pseudoreal_operator.observe.stages import Stage, StageKind, is_started, with_phase_fields, with_stage_started
from pseudoreal_operator.observe.view import Pod, View
from pseudoreal_operator.status.conditions import ACCEPTED, NOT_SUSPENDED, NewCondition, not_accepted
from pseudoreal_operator.status.events import Event, Reason
from pseudoreal_operator.untrusted_text import sanitize

State = Literal["Pending", "Queued", "Training", "Delinking", "Restarting", "Suspended", "Complete", "Failed"]


@dataclass(frozen=True)
class Decision:
    """Outcome of a rule. `status` is the new status without conditions, state and current phase, which `plan` adds.
    `events` announce, in order, the changes made together with the status; empty if the status stays. `children`: stage
    whose children must exist; None: no children need to exist. Jobs of other executions must not run."""

    status: PseudoRealJobStatus
    state: State
    progressing: NewCondition
    events: tuple[Event, ...] = ()
    children: Stage | None = None
    with_dry_run: bool = False
    """Whether to try the children of all stages in a dry run."""
    accepted: NewCondition = ACCEPTED
    suspended: NewCondition = NOT_SUSPENDED
    ended: NewCondition | None = None
    requeue_after: float | None = 0.0
    """Seconds until the next pass; 0: at once; None: when something changes."""


def state_at(stage: Stage) -> State:
    return "Training" if stage.kind is StageKind.TRAIN else "Delinking"


def waiting_state(view: View) -> State:
    return "Restarting" if view.status.restart_after else state_at(view.stage)


def progressing(reason: str, message: str) -> NewCondition:
    return NewCondition("Progressing", "True", reason, message)


def not_progressing(reason: str, message: str) -> NewCondition:
    return NewCondition("Progressing", "False", reason, message)


def event(view: View, reason: Reason, message: str, detail: str = "") -> Event:
    """Return an event of the present execution of the present stage."""
    return Event(reason, message, view.stage.number, view.execution.number, detail)


def start_events(view: View) -> Iterator[Event]:
    """Yield the events for the start of the present execution. The event for the start of the stage is left out if the
    stored status says that the stage has started."""
    if view.status.restart_after is not None:
        yield event(view, Reason.RESTART_STARTED, f"Execution {view.execution.number} starts.")
    if is_started(view.status.phases, view.stage) and not view.has_unrecorded_start:
        return
    if view.stage.kind is StageKind.DELINK:
        grown = growth_text(view.spec, view.stage.index)
        text = f"The delink into phase {view.stage.phase} starts{f': it is {grown}' if grown else ''}."
        yield event(view, Reason.DELINK_STARTED, text)
    else:
        yield event(view, Reason.PHASE_STARTED, f"Phase {view.stage.phase} starts.")


def unposted_start_events(view: View) -> tuple[Event, ...]:
    """Return the start events that an operator may not have posted, because the operator died after the creation of the
    Job. A repeated event has the same name, so it is stored once."""
    return tuple(start_events(view)) if view.job is not None else ()


def closing_events(view: View) -> tuple[Event, ...]:
    """Return the events to post before the events of an execution's end."""
    kept = sidecar_note(view)
    return (*unposted_start_events(view), *((event(view, Reason.SIDECAR_ENDED, kept),) if kept else ()))


MAX_BACKOFF_SECONDS = 300
REMEMBERED_FAULTS = 100
_DOUBLINGS = 10
"""Largest number of doublings of a wait. The wait is then beyond the maximum; more doublings would only make a huge
integer."""


def retries_since_checkpoint(status: PseudoRealJobStatus) -> Retries:
    """Return the restarts since the newest checkpoint."""
    newest = status.checkpoint.latest if status.checkpoint else None
    known = status.retries
    return known if known and known.checkpoint == newest else Retries(restarts=0, checkpoint=newest)


def with_retry(status: PseudoRealJobStatus, *, counts: bool) -> PseudoRealJobStatus:
    """Return the status with one more restart since the newest checkpoint."""
    known = retries_since_checkpoint(status)
    more = {"restarts": known.restarts + 1, "disruptions": known.disruptions + (not counts)}
    return status_with(status, retries=known.model_copy(update=more))


def wait_seconds(status: PseudoRealJobStatus, restart: Restart) -> int:
    """Return the seconds to wait before the next restart: exponential backoff up to MAX_BACKOFF_SECONDS, or
    spec.restart.backoffSeconds if that is larger. A first wait of 0 grows as well: 0, 1, 3, 7, ..."""
    first, doublings = restart.backoff_seconds, min(_DOUBLINGS, retries_since_checkpoint(status).restarts)
    return min(max(MAX_BACKOFF_SECONDS, first), max(first << doublings, (1 << doublings) - 1))


def why_exhausted(status: PseudoRealJobStatus, restart: Restart, now: datetime, *, counts: bool) -> str | None:
    """Return a sentence if spec.restart allows no further restart of this kind (`counts`: a fault, else a
    disruption); else None."""
    return _too_many_faults(status, restart, now) if counts else _too_many_disruptions(status, restart)


def _too_many_faults(status: PseudoRealJobStatus, restart: Restart, now: datetime) -> str | None:
    allowed, window = restart.max_restarts, restart.window_seconds
    used = len(faults_in_window(status.faults, window, now)) if window else status.restarts
    if used < allowed:
        return None
    within = f" within spec.restart.windowSeconds, {window} s" if window else ""
    return f"No restart is left (used{within}: {used}; spec.restart.maxRestarts: {allowed})."


def _too_many_disruptions(status: PseudoRealJobStatus, restart: Restart) -> str | None:
    used = retries_since_checkpoint(status).disruptions
    if used < restart.max_disruptions:
        return None
    return (
        f"No restart is left (after disruptions, without a new checkpoint between them: {used};"
        f" spec.restart.maxDisruptions: {restart.max_disruptions})."
    )


def with_fault(status: PseudoRealJobStatus, restart: Restart, fault: Fault, now: datetime) -> PseudoRealJobStatus:
    """Return the status with one more fault that counts."""
    faults = [*faults_in_window(status.faults, restart.window_seconds, now), fault][-REMEMBERED_FAULTS:]
    failed = status_with(status, restarts=status.restarts + 1, faults=faults)
    return _with_avoided_nodes(failed, restart)


def with_disruption(status: PseudoRealJobStatus, restart: Restart, fault: Fault, now: datetime) -> PseudoRealJobStatus:
    """Return the status with one more disruption: a failure that does not count and is due to the node."""
    disruptions = [*faults_in_window(status.disruptions, restart.window_seconds, now), fault][-REMEMBERED_FAULTS:]
    return _with_avoided_nodes(status_with(status, disruptions=disruptions), restart)


def faults_in_window(faults: Sequence[Fault], window: int | None, now: datetime) -> list[Fault]:
    """Return the faults within spec.restart.windowSeconds; all remembered faults if there is no window."""
    if window is None:
        return list(faults)
    oldest = now - timedelta(seconds=window)
    return [fault for fault in faults if clock.from_text(fault.time) > oldest]


def _with_avoided_nodes(status: PseudoRealJobStatus, restart: Restart) -> PseudoRealJobStatus:
    known = status.avoided_nodes
    counts = Counter(fault.node for fault in (*status.faults, *status.disruptions) if fault.node)
    new = [node for node, count in counts.items() if count >= restart.avoid_nodes_after and node not in known]
    return status_with(status, avoided_nodes=[*known, *new][-REMEMBERED_FAULTS:])


@dataclass(frozen=True)
class Cause:
    """Cause of an execution's end: a reason in one word, a sentence, the pod where the failure began (None: unknown),
    and whether the restart counts for spec.restart.maxRestarts."""

    reason: str
    sentence: str
    pod: Pod | None = None
    counts: bool = True
    contended: bool = False
    """Whether other jobs wait for the same resources and end for the same reason; each restart then gets jitter."""


def reject_job(status: PseudoRealJobStatus, sentence: str, now: datetime) -> Decision:
    """Return the decision for a job whose spec is invalid."""
    failure = Event(Reason.FAILED, sentence, stage=0, execution=1)
    return replace(
        _failed_decision(status, "InvalidSpec", sentence, now), events=(failure,), accepted=not_accepted(sentence)
    )


def pod_error_sentence(error: Exception) -> str:
    """Return a sentence for an error that the checks of the spec did not anticipate."""
    said = f"{type(error).__name__}: {sanitize(str(error))}"
    return (
        f"No pod can be built from the spec: {said}. Probably spec.pod.template is not a valid pod template; correct it"
    )


def fail(view: View, status: PseudoRealJobStatus, reason: str, sentence: str) -> Decision:
    phases = with_phase_fields(status.phases, view.stage.index, state="Failed")
    sentences = " ".join([sentence, *_how_to_continue(view, status)])
    failed = _failed_decision(status_with(status, phases=phases), reason, sentences, view.now)
    return replace(failed, events=(*closing_events(view), event(view, Reason.FAILED, sentences)))


def _how_to_continue(view: View, status: PseudoRealJobStatus) -> Iterator[str]:
    if not status.checkpoint:
        return
    way = f"with spec.checkpoint.continueFrom: {work_folder(view.metadata.name, view.metadata.uid)}"
    volume = view.spec.checkpoint.storage.mounted
    if volume is None or volume.claim_name is not None:
        yield f"(Its checkpoints stay: a new job can continue from them {way})"
        return
    way += f" and spec.checkpoint.storage.volume.claimName: {claim_name(view.metadata.name)}"
    if volume.retention_policy == "Retain":
        yield f"(Its checkpoints stay: a new job can continue from them {way})"
    else:
        yield (
            "(Its checkpoints are deleted with this job, because spec.checkpoint.storage.volume.retentionPolicy is"
            f" Delete. Keep this job while a new job with another name continues from them {way})"
        )


def succeed(view: View, status: PseudoRealJobStatus, *events: Event) -> Decision:
    last = status.phases[-1]
    text = f"All phases are done at step {last.step}; the model is checkpoint {last.end_checkpoint}."
    return Decision(
        status_with(status, completion_time=clock.to_text(view.now)),
        "Complete",
        not_progressing("Complete", "The job is done."),
        events=(*events, event(view, Reason.COMPLETED, text)),
        ended=NewCondition("Complete", "True", "AllPhasesDone", text),
    )


def restart_or_fail(view: View, why: Cause, *also_reasons: Reason) -> Decision:
    """Return the decision to start another execution if spec.restart allows one, else to fail the job. Events with
    the reasons `also_reasons` carry the same text as the event of the failed execution."""
    status = results.with_checkpoints(view.status, view.terminated_pods)
    exhausted = why_exhausted(status, view.spec.restart, view.now, counts=why.counts)
    if exhausted:
        return fail(view, status, "RestartsExhausted", f"{why.sentence} {exhausted} What to do: {view.logs_command}")
    status = with_failure(view, with_stage_started(status, view.stage), why)
    text = f"{why.sentence}{exclusion.exclusion_note(status, why.pod, view.now)} {_continuation(view, status)}"
    new = Announcement("Restarting", text, (*also_reasons, Reason.EXECUTION_FAILED))
    wait = wait_seconds(status, view.spec.restart)
    wait += _jitter(view, wait) if why.contended else 0
    return announce(view, with_retry(status, counts=why.counts), new, wait)


def _jitter(view: View, seconds: int) -> int:
    """Return a delay between 0 and `seconds` that differs between jobs and executions and is the same in each pass."""
    return crc32(f"{view.metadata.uid}/{view.execution.number}".encode()) % (seconds + 1)


@dataclass(frozen=True)
class Announcement:
    """Announcement of a new execution: reason of the condition, text, and reasons of the events."""

    reason: str
    text: str
    reasons: tuple[Reason, ...]


def announce(view: View, status: PseudoRealJobStatus, new: Announcement, wait: int) -> Decision:
    """Return the decision to start a new execution at the current stage of `status`, `wait` seconds after the first pod
    failed, or after now if no pod failed."""
    after = clock.to_text(_failed_at(view) + timedelta(seconds=wait))
    number = status.execution + 1
    text = f"{new.text}, not before {after}."
    announced = [event(view, reason, text) for reason in new.reasons]
    return Decision(
        status_with(status, execution=number, restart_after=after, execution_time=None),
        "Restarting",
        not_progressing(new.reason, text),
        events=(*closing_events(view), *announced, *avoided_node_events(view, status)),
    )


def avoided_node_events(view: View, status: PseudoRealJobStatus) -> Iterator[Event]:
    """Yield an event for each node that the new status avoids and the old one did not."""
    for node in status.avoided_nodes:
        if node not in view.status.avoided_nodes:
            text = f"Several faults of this job began on node {node}; its pods now run on other nodes if there is room."
            yield event(view, Reason.NODE_AVOIDED, text, detail=node)


def _failed_at(view: View) -> datetime:
    """Return the time at which the first pod failed; now if no pod has failed. The backoff starts at this time, so
    neither pods that end slowly nor an absence of the operator prolongs the backoff."""
    failed = view.pods.failed
    ends = [pod.termination.finished for pod in failed if pod.termination and pod.termination.finished]
    ends = ends or [end for end in (*(pod.ended for pod in failed), view.job.ended if view.job else None) if end]
    return min([view.now, *map(clock.from_text, ends)])


def with_failure(
    view: View, status: PseudoRealJobStatus, why: Cause, *, restart_in_place: int | None = None
) -> PseudoRealJobStatus:
    """Return the status with a failure of the execution, or of one of its pods, recorded. A failure that counts is
    recorded as a fault. Otherwise each pod with a fault of its node is recorded as a disruption: several nodes may have
    rejected pods at once."""
    others = [pod for pod in view.pods.failed if pod is not why.pod and is_rejected_by_node(pod)]
    faults = [_fault(view, why.reason, pod, restart_in_place) for pod in (why.pod, *others)]
    if why.counts:
        return with_fault(status, view.spec.restart, faults[0], view.now)
    for fault, pod in zip(faults, (why.pod, *others), strict=True):
        if pod and is_node_at_fault(pod):
            status = with_disruption(status, view.spec.restart, fault, view.now)
    return status


def _fault(view: View, reason: str, pod: Pod | None, restart_in_place: int | None) -> Fault:
    return Fault(
        execution=view.execution.number,
        time=clock.to_text(view.now),
        reason=(node_fault(pod) if pod else None) or reason,
        pod=pod.name if pod else None,
        node=(pod.node or None) if pod else None,
        restart_in_place=restart_in_place,
    )


def _continuation(view: View, status: PseudoRealJobStatus) -> str:
    place = f"checkpoint {status.checkpoint.latest} or a newer one" if status.checkpoint else "the newest checkpoint"
    return f"Execution {status.execution + 1} at {view.stage.title} continues from {place}"


def _failed_decision(status: PseudoRealJobStatus, reason: str, sentence: str, now: datetime) -> Decision:
    return Decision(
        status_with(status, completion_time=clock.to_text(now), restart_after=None, transition=None),
        "Failed",
        not_progressing("Failed", "The job failed; the condition Failed says why."),
        ended=NewCondition("Failed", "True", reason, sentence),
    )

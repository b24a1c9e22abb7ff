"""Executions that are started on purpose: a phase is trained again, or longer than first requested. Pure.

Again: at the user's request, or because the delink after the phase timed out. `discards` tell the trainer which
checkpoints are invalid; the trainer removes them when the new execution commits its first checkpoint.

Longer: phases were added, or the last phase was prolonged. The Job of an execution records the last step of its phase
and the last step of the job. If the present spec has other last steps, a new execution with these steps follows. This
is not a fault, and uses up no restart of spec.restart.
"""

from dataclasses import replace

from pseudoreal_api.resolved.resolve import last_steps
from pseudoreal_api.spec.request import Request
from pseudoreal_api.status.status import CheckpointStatus, Discard, PhaseStatus, PseudoRealJobStatus
from pseudoreal_api.wire.messages import TerminationMessage

from pseudoreal_operator.changes import Result, phase_with, status_with
from pseudoreal_operator.failures import results
from pseudoreal_operator.lifecycle.acceptance import find_problem_now
from pseudoreal_operator.lifecycle.decisions import (
    Announcement,
    Cause,
    Decision,
    announce,
    fail,
    progressing,
    wait_seconds,
    waiting_state,
    why_exhausted,
    with_failure,
    with_retry,
)
from pseudoreal_operator.observe.stages import Phases, StageKind, last_steps_of, open_requests
from pseudoreal_operator.observe.view import JobState, View
from pseudoreal_operator.status.events import Reason

_NO_RESULT: Result = {
    "completion_time": None,
    "end_checkpoint": None,
    "step": None,
    "tokens": None,
    "loss": None,
    "start_validation_loss": None,
    "validation_loss": None,
}


def repeat_phase(view: View, index: int, request: Request) -> Decision:
    """Return the decision to train the phase at `index` again, from its start checkpoint."""
    phase, old = view.spec.phases[index], view.status.phases
    number = view.status.execution + 1
    # A delink's checkpoint keeps the step at which the previous phase ended; this phase's own checkpoints begin one
    # step later.
    first = (old[index - 1].step or 0) + 1 if index else 0
    begin = old[index].start_checkpoint
    status = status_with(
        view.status,
        phases=_reset_phases(old, index, Discard(before_execution=number, from_step=first)),
        checkpoint=CheckpointStatus(latest=begin, step=first - 1) if begin else None,
        progress=None,
        retries=None,
        transition=None,
        elastic=None,
        served_requests=[*view.status.served_requests, request.id],
    )
    text = (
        f"Request {request.id} asks to repeat phase {phase.name}. Execution {number} trains it from"
        f" {'checkpoint ' + begin if begin else 'random weights'}"
    )
    new = Announcement("PhaseRepeated", text, (Reason.PHASE_REPEATED,))
    return announce(view, status, new, view.spec.restart.backoff_seconds)


def roll_back(view: View, sentence: str) -> Decision:
    """Return the decision to resume the phase before the delink from the newest checkpoint before its end
    checkpoint."""
    index = view.stage.index - 1
    before = view.status.phases[index]
    exhausted = why_exhausted(view.status, view.spec.restart, view.now, counts=True)
    if exhausted:
        return fail(view, view.status, "DelinkTimeout", f"{sentence} {exhausted}")
    number = view.status.execution + 1
    discard = Discard(before_execution=number, from_step=before.step or 0)
    # Keep the checkpoints of later phases from the job that this job continues (spec.checkpoint.continueFrom): they
    # stay valid when the end of this phase is trained again.
    phases = _reset_phases(view.status.phases, index, discard, continued=False)
    status = with_failure(view, view.status, Cause("DelinkTimeout", sentence))
    wait = wait_seconds(status, view.spec.restart)
    status = status_with(with_retry(status, counts=True), phases=phases, transition=None)
    text = f"{sentence} Execution {number} trains the end of phase {before.name} again, from an earlier checkpoint"
    return announce(view, status, Announcement("RolledBack", text, (Reason.DELINK_ROLLED_BACK,)), wait)


def _reset_phases(phases: Phases, index: int, discard: Discard, *, continued: bool = True) -> Phases:
    """Return the phases with the phase at `index` in training and all later phases not begun. `continued`: whether to
    discard also the checkpoints of later phases from the continued job (spec.checkpoint.continueFrom)."""
    after = discard.model_copy(update={"from_step": 0, "continued": continued})
    return [
        *phases[:index],
        phase_with(phases[index], **_NO_RESULT, state="Training", discards=_with_discard(phases[index], discard)),
        *(
            PhaseStatus(name=phase.name, state="Pending", discards=_with_discard(phase, after))
            for phase in phases[index + 1 :]
        ),
    ]


def _with_discard(phase: PhaseStatus, discard: Discard) -> list[Discard]:
    """Return the phase's discards and a new one. Earlier discards stay in force, because their checkpoints may still
    exist; a discard that the new one covers is dropped."""
    return [*(known for known in phase.discards or () if not _covers(discard, known)), discard]


def _covers(rule: Discard, other: Discard) -> bool:
    """Return whether `rule`, the newer one, discards every checkpoint that `other` discards."""
    return rule.from_step <= other.from_step and (rule.continued or not other.continued)


def is_untrained(status: PseudoRealJobStatus, index: int) -> bool:
    """Return whether the phase has not been trained yet, so that there is nothing to train again."""
    return status.phases[index].state in ("Pending", "Delinking")


def repeat_requested(view: View) -> Decision | None:
    request = next(iter(open_requests(view.spec, view.status, "RepeatPhase")), None)
    if request is None:
        return None
    index = next(i for i, phase in enumerate(view.status.phases) if phase.name == request.phase)
    if not is_untrained(view.status, index):
        return repeat_phase(view, index, request)
    text = f"Phase {request.phase}, which request {request.id} names, has not started yet: there is nothing to repeat."
    status = status_with(view.status, served_requests=[*view.status.served_requests, request.id])
    runs = view.job is not None and view.job.state is JobState.ACTIVE
    claim = progressing("PhaseNotStarted", text)
    return Decision(status, waiting_state(view), claim, children=view.stage if runs else None)


def spec_changed(view: View) -> Decision | None:
    """Start a new execution with the present spec when phases were added, or the last phase was prolonged, while pods
    train. The new execution continues from a checkpoint that the pods save before they end. An invalid spec changes
    nothing yet: the pods train on, and the job fails at the invalid phase."""
    job = view.job
    if view.stage.kind is not StageKind.TRAIN or job is None or job.state is not JobState.ACTIVE or job.queued:
        return None
    if job.last_steps in (None, last_steps_of(view.spec, view.stage)):
        return None
    if find_problem_now(view.spec, view.metadata.name, view.status.phases):
        return None
    return train_on(view)


def train_on(view: View) -> Decision:
    """Return the decision to continue with the present spec. The pods save a checkpoint before they end."""
    text = (
        f"The job now trains until step {last_steps(view.spec)[-1]}. Execution {view.status.execution + 1} continues"
        f" at {view.stage.title}, from a checkpoint that is being saved"
    )
    decision = announce(view, view.status, Announcement("SpecChanged", text, (Reason.SPEC_CHANGED,)), wait=0)
    return replace(decision, with_dry_run=True)


def ended_too_early(view: View, message: TerminationMessage) -> bool:
    """Return whether the phase ended at the last step that its execution was created with, although the spec now has a
    later last step."""
    if view.job is None or view.job.last_steps is None:
        return False
    planned = int(view.job.last_steps.partition("/")[0])
    return message.step == planned < last_steps(view.spec)[view.stage.index]


def train_longer(view: View, message: TerminationMessage) -> Decision:
    """Return the decision to continue from the end of a phase that was prolonged in the meantime."""
    status = results.with_checkpoints(view.status, view.terminated_pods)
    text = (
        f"{view.stage.title.capitalize()} ended at step {message.step}, but now trains until step"
        f" {last_steps(view.spec)[view.stage.index]}. Execution {status.execution + 1} continues from checkpoint"
        f" {message.checkpoint}"
    )
    return announce(view, status, Announcement("PhaseProlonged", text, (Reason.PHASE_PROLONGED,)), wait=0)

"""Training longer than was first asked for: phases that are added, and a last phase that is prolonged. Pure.

The steps at which a phase and the job end stand on the Job of an execution. Where they differ from what the spec says
now, the next execution is made with the new ones. That is no fault, and takes no restart from spec.restart.
"""

from dataclasses import replace

from pseudoreal_api.resolved.resolve import last_steps
from pseudoreal_api.wire.messages import TerminationMessage

from pseudoreal_operator.failures import results
from pseudoreal_operator.lifecycle.decisions import Announcement, Decision, announce
from pseudoreal_operator.observe.view import View
from pseudoreal_operator.status.events import Reason


def train_on(view: View) -> Decision:
    """The decision to go on with what the spec says now. The pods save a checkpoint before they end."""
    text = (
        f"The job is to train until step {last_steps(view.spec)[-1]} now. Execution {view.status.execution + 1} goes on"
        f" with that at {view.stage.title}, from a checkpoint that is saved now"
    )
    decision = announce(view, view.status, Announcement("SpecChanged", text, (Reason.SPEC_CHANGED,)), wait=0)
    return replace(decision, tries_children=True)


def ended_too_early(view: View, message: TerminationMessage) -> bool:
    """Whether a phase has ended at its last step, and that step was moved while it trained."""
    if view.job is None or view.job.last_steps is None:
        return False
    planned = int(view.job.last_steps.partition("/")[0])
    return message.step == planned < last_steps(view.spec)[view.stage.index]


def train_longer(view: View, message: TerminationMessage) -> Decision:
    """The decision to go on from the end of a phase that was prolonged meanwhile."""
    status = results.with_checkpoints(view.status, view.words)
    text = (
        f"{view.stage.title.capitalize()} has ended at step {message.step}, and is to train until step"
        f" {last_steps(view.spec)[view.stage.index]} now. Execution {status.execution + 1} goes on from checkpoint"
        f" {message.checkpoint}"
    )
    return announce(view, status, Announcement("PhaseProlonged", text, (Reason.PHASE_PROLONGED,)), wait=0)

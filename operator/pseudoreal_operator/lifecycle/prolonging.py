"""Training longer than first requested: phases are added, or the last phase is prolonged. Pure.

The Job of an execution records the last step of its phase and the last step of the job. If the present spec has other
steps, the next execution is created with these. This is not a fault, and takes no restart from spec.restart.
"""

from dataclasses import replace

from pseudoreal_api.resolved.resolve import last_steps
from pseudoreal_api.wire.messages import TerminationMessage

from pseudoreal_operator.failures import results
from pseudoreal_operator.lifecycle.decisions import Announcement, Decision, announce
from pseudoreal_operator.observe.view import View
from pseudoreal_operator.status.events import Reason


def train_on(view: View) -> Decision:
    """Return the decision to continue with the present spec. The pods save a checkpoint before they end."""
    text = (
        f"The job is to train until step {last_steps(view.spec)[-1]} now. Execution {view.status.execution + 1} goes on"
        f" with that at {view.stage.title}, from a checkpoint that is saved now"
    )
    decision = announce(view, view.status, Announcement("SpecChanged", text, (Reason.SPEC_CHANGED,)), wait=0)
    return replace(decision, with_dry_run=True)


def ended_too_early(view: View, message: TerminationMessage) -> bool:
    """Return whether a phase has ended at its last step, and the spec moved this step while the phase trained."""
    if view.job is None or view.job.last_steps is None:
        return False
    planned = int(view.job.last_steps.partition("/")[0])
    return message.step == planned < last_steps(view.spec)[view.stage.index]


def train_longer(view: View, message: TerminationMessage) -> Decision:
    """Return the decision to continue from the end of a phase that was prolonged in the meantime."""
    status = results.with_checkpoints(view.status, view.pods_with_deleted)
    text = (
        f"{view.stage.title.capitalize()} has ended at step {message.step}, and is to train until step"
        f" {last_steps(view.spec)[view.stage.index]} now. Execution {status.execution + 1} goes on from checkpoint"
        f" {message.checkpoint}"
    )
    return announce(view, status, Announcement("PhaseProlonged", text, (Reason.PHASE_PROLONGED,)), wait=0)

"""What follows a step in which a loss or a gradient was not finite, as spec.optimizer.nonFinite says. Pure."""

from math import isfinite

from pseudoreal_trainer.checkpoint.manifest import Manifest, Skipped
from pseudoreal_trainer.engine.reductions import REMEDY
from pseudoreal_trainer.errors import TrainingError
from pseudoreal_trainer.training.step import StepResult

MOST_IN_A_ROW = 10
"""Steps. One bad batch passes by itself; a training that diverged does not."""


def counted(state: Manifest, result: StepResult, step: int, *, skips: bool) -> Skipped:
    """The count after this step. Raises TrainingError where training must not go on."""
    if not skips and not result.trains:
        raise TrainingError(f"{_described(result, step)}; {REMEDY}")
    if not result.left_out:
        return state.skipped.model_copy(update={"in_a_row": 0})
    in_a_row = state.skipped.in_a_row + 1
    if in_a_row >= MOST_IN_A_ROW:
        raise TrainingError(
            f"updates of {in_a_row} steps in a row were left out, as losses or gradients were not finite:"
            f" {_described(result, step)}; {REMEDY}"
        )
    return Skipped(steps=state.skipped.steps + 1, in_a_row=in_a_row)


def _described(result: StepResult, step: int) -> str:
    for what, value in (("loss", result.loss), ("gradient norm", result.norm)):
        if not isfinite(value):
            return f"the {what} of step {step} is {value}"
    return f"gradients of step {step} are not finite"

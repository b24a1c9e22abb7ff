"""Steps that end a job or an attempt. Pure."""

from dataclasses import replace
from datetime import datetime, timedelta

from pseudoreal_api.status import PseudoRealJobStatus

from pseudoreal_operator import clock, results
from pseudoreal_operator.case import Case, Step, stands
from pseudoreal_operator.conditions import Claim, refused
from pseudoreal_operator.stages import changed, started

MAX_BACKOFF_SECONDS = 300


def refuse(status: PseudoRealJobStatus, sentence: str, now: datetime) -> Step:
    """The job cannot run as it is written."""
    return replace(_failed(status, "InvalidSpec", sentence, now), accepted=refused(sentence))


def fail(case: Case, memory: PseudoRealJobStatus, reason: str, sentence: str) -> Step:
    phases = changed(memory.phases, case.stage.index, state="Failed")
    return _failed(memory.model_copy(update={"phases": phases}), reason, sentence, case.now)


def succeed(memory: PseudoRealJobStatus, now: datetime) -> Step:
    last = memory.phases[-1]
    text = f"All phases are done at step {last.step}; the model is checkpoint {last.end_checkpoint}."
    return Step(
        memory.model_copy(update={"completion_time": clock.to_text(now)}),
        "Succeeded",
        stands("Succeeded", "The job is done."),
        ended=Claim("Succeeded", "True", "AllPhasesDone", text),
        wake_after=None,
    )


def restart(case: Case, sentence: str, *, counts: bool) -> Step:
    """Announces the next attempt. Its children come later, when the number is safe in the status."""
    memory = results.with_checkpoints(started(case.status, case.stage), case.pods)
    wait = _backoff_seconds(case, memory.restarts if counts else 0)
    # From the failure's own time, so that an operator that was away does not wait again.
    since = clock.from_text(case.job.ended) if case.job and case.job.ended else case.now
    after = clock.to_text(since + timedelta(seconds=wait))
    update: dict[str, object] = {"execution_attempt": memory.execution_attempt + 1, "attempt": memory.attempt + counts}
    update |= {"restarts": memory.restarts + counts, "restart_after": after}
    place = f"checkpoint {memory.checkpoint.latest} or a newer one" if memory.checkpoint else "the newest checkpoint"
    number = memory.execution_attempt + 1
    text = f"{sentence} Execution {number} at {case.stage.title} goes on from {place}, not before {after}."
    return Step(memory.model_copy(update=update), "Restarting", stands("Restarting", text))


def _backoff_seconds(case: Case, restarts: int) -> int:
    # Ten doublings are beyond the cap already; more would only make a huge integer.
    return min(MAX_BACKOFF_SECONDS, case.spec.restart.backoff_seconds << min(restarts, 10))


def _failed(memory: PseudoRealJobStatus, reason: str, sentence: str, now: datetime) -> Step:
    return Step(
        memory.model_copy(update={"completion_time": clock.to_text(now), "restart_after": None}),
        "Failed",
        stands("Failed", "The job failed; the condition Failed says why."),
        ended=Claim("Failed", "True", reason, sentence),
        wake_after=None,
    )

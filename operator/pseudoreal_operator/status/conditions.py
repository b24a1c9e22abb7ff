"""Conditions of a job: states for programs, and sentences for people. Pure.

Accepted, Progressing, Delinked and Suspended always exist, once the job could be read. As in batch/v1, Complete or
Failed is added, with status True, when the job has ended. The printer column REASON shows the reason of Failed, so a
job that has not failed must not have the condition Failed. Delinked is True once the last delink is done; in a job of
one phase it is True at once, with the reason NotNeeded.

If the API server rejects a status, the status is written without its texts (`without_texts`), and then also without
figures, so that states and names are stored without delay. Each text is replaced by a sentence with a digest of the
text. So the status records the rejected texts, and the operator tries only other texts.
"""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from pseudoreal_api.resolved.resolve import growth_text
from pseudoreal_api.spec.job import PseudoRealJobSpec
from pseudoreal_api.status.status import Condition, PhaseStatus, PseudoRealJobStatus

from pseudoreal_operator import clock
from pseudoreal_operator.changes import phase_with, status_with
from pseudoreal_operator.untrusted_text import shorten

Truth = Literal["True", "False", "Unknown"]
_MESSAGE_CHARACTERS = 4096
_REASON_CHARACTERS = 128
_REJECTED_TEXT = "The API server refused the text of this condition"


@dataclass(frozen=True)
class NewCondition:
    """New value of a condition. `merge_conditions` and `with_condition` add lastTransitionTime and
    observedGeneration."""

    type: str
    status: Truth
    reason: str
    message: str


ACCEPTED = NewCondition("Accepted", "True", "Valid", "The job can run.")
NOT_SUSPENDED = NewCondition("Suspended", "False", "NotRequested", "spec.suspend is false.")


def find(status: PseudoRealJobStatus, kind: str) -> Condition | None:
    return next((c for c in status.conditions if c.type == kind), None)


def is_true(status: PseudoRealJobStatus, kind: str) -> bool:
    found = find(status, kind)
    return found is not None and found.status == "True"


def has_ended(status: PseudoRealJobStatus) -> bool:
    return is_true(status, "Complete") or is_true(status, "Failed")


def not_accepted(sentence: str) -> NewCondition:
    return NewCondition("Accepted", "False", "InvalidSpec", sentence)


def start_checkpoint_text(spec: PseudoRealJobSpec, index: int, phase: PhaseStatus) -> str:
    """Return the first checkpoint of the phase at `index`, and what the transition did."""
    grown = growth_text(spec, index)
    return f"the {'' if grown else 'delinked '}checkpoint {phase.start_checkpoint}{f', {grown}' if grown else ''}"


def delinked_condition(spec: PseudoRealJobSpec, phases: Sequence[PhaseStatus]) -> NewCondition:
    wanted = phases[1:]
    done = [phase for phase in wanted if phase.start_checkpoint]
    if not phases:
        return NewCondition("Delinked", "Unknown", "NotAccepted", "The job was not accepted.")
    if not wanted:
        return NewCondition("Delinked", "True", "NotNeeded", "The job has one phase.")
    if len(done) < len(wanted):
        return NewCondition("Delinked", "False", "Pending", f"{len(done)} of {len(wanted)} delinks are done.")
    last = wanted[-1]
    start = start_checkpoint_text(spec, len(phases) - 1, last)
    return NewCondition("Delinked", "True", "Completed", f"Phase {last.name} starts from {start}.")


def merge_conditions(
    old: Sequence[Condition], wanted: Sequence[NewCondition], generation: int, now: datetime
) -> list[Condition]:
    """Return the new conditions; the transition time of a condition changes only when its status does."""
    known = {condition.type: condition for condition in old}
    return [_condition(known.get(new.type), new, generation, now) for new in wanted]


def with_condition(old: Sequence[Condition], wanted: NewCondition, generation: int, now: datetime) -> list[Condition]:
    """Return the old conditions, with one of them replaced or added."""
    known = {condition.type: condition for condition in old}
    new = _condition(known.get(wanted.type), wanted, generation, now)
    return list((known | {wanted.type: new}).values())


def _valid_reason(reason: str) -> str:
    """Return the reason in a form that the API server accepts: some reasons come from kubelets and plugins, which
    may use any text."""
    return re.sub(r"^[^A-Za-z]+|[^A-Za-z0-9_]+$|[^A-Za-z0-9_,:]", "", reason)[:_REASON_CHARACTERS] or "Other"


def _condition(old: Condition | None, new: NewCondition, generation: int, now: datetime) -> Condition:
    same = old is not None and old.status == new.status
    text = shorten(new.message, _MESSAGE_CHARACTERS)
    return Condition(
        type=new.type,
        status=new.status,
        reason=_valid_reason(new.reason),
        message=old.message if old and old.message == sentence_for(text) else text,
        last_transition_time=old.last_transition_time if old and same else clock.to_text(now),
        observed_generation=generation,
    )


def without_texts(status: PseudoRealJobStatus) -> PseudoRealJobStatus:
    return status_with(status, conditions=[_without_text(condition) for condition in status.conditions])


def without_figures(status: PseudoRealJobStatus) -> PseudoRealJobStatus:
    """Return the status without its texts, progress, placement, layouts and losses. No decision needs these values."""
    known = without_texts(status)
    phases = [
        phase_with(phase, layout=None, loss=None, start_validation_loss=None, validation_loss=None)
        for phase in known.phases
    ]
    known = status_with(known, progress=None, placement=None, phases=phases)
    parts = {name: getattr(known, name) for name in ("spares", "elastic", "restarts_in_place")}
    return known.model_copy(
        update={name: part.model_copy(update={"message": ""}) for name, part in parts.items() if part}
    )


def texts_of(status: PseudoRealJobStatus) -> dict[str, str]:
    """Return digest -> text, for the texts that were not rejected before."""
    messages = [condition.message for condition in status.conditions]
    return {_digest(message): message for message in messages if not message.startswith(_REJECTED_TEXT)}


def sentence_for(text: str) -> str:
    """Return the sentence that replaces a rejected text."""
    return f"{_REJECTED_TEXT}; the operator's log shows it as text {_digest(text)}."


def _without_text(condition: Condition) -> Condition:
    if condition.message.startswith(_REJECTED_TEXT):
        return condition
    return condition.model_copy(update={"message": sentence_for(condition.message)})


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]

"""The conditions of a job: the truth for programs, and sentences for people. Pure.

Accepted, Progressing, Delinked and Suspended are always there, once the job could be read. Succeeded or Failed appears,
as True, when the job has ended: the printer column REASON shows the reason of Failed, so a job that has not failed must
not have one.
Delinked is True once the last delink is done, and for a job of one phase at once, with the reason NotNeeded.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from pseudoreal_api.status.status import Condition, PhaseStatus, PseudoRealJobStatus

from pseudoreal_operator import clock
from pseudoreal_operator.foreign import cut
from pseudoreal_operator.status.refused import sentence_for

Truth = Literal["True", "False", "Unknown"]
_MESSAGE_CHARACTERS = 4096


@dataclass(frozen=True)
class Claim:
    """A condition without its bookkeeping."""

    type: str
    status: Truth
    reason: str
    message: str


ACCEPTED = Claim("Accepted", "True", "Valid", "The job can run.")
NOT_SUSPENDED = Claim("Suspended", "False", "NotRequested", "spec.suspend is false.")


def find(status: PseudoRealJobStatus, kind: str) -> Condition | None:
    return next((c for c in status.conditions if c.type == kind), None)


def holds(status: PseudoRealJobStatus, kind: str) -> bool:
    found = find(status, kind)
    return found is not None and found.status == "True"


def has_ended(status: PseudoRealJobStatus) -> bool:
    return holds(status, "Succeeded") or holds(status, "Failed")


def refused(sentence: str) -> Claim:
    return Claim("Accepted", "False", "InvalidSpec", sentence)


def delinked(phases: Sequence[PhaseStatus]) -> Claim:
    wanted = phases[1:]
    done = [phase for phase in wanted if phase.start_checkpoint]
    if not phases:
        return Claim("Delinked", "Unknown", "NotAccepted", "The job was not accepted.")
    if not wanted:
        return Claim("Delinked", "True", "NotNeeded", "The job has one phase.")
    if len(done) < len(wanted):
        return Claim("Delinked", "False", "Pending", f"{len(done)} of {len(wanted)} delinks are done.")
    last = wanted[-1]
    text = f"Phase {last.name} starts from the delinked checkpoint {last.start_checkpoint}."
    return Claim("Delinked", "True", "Completed", text)


def updated(old: Sequence[Condition], claims: Sequence[Claim], generation: int, now: datetime) -> list[Condition]:
    """The claims as conditions; the time moves only when the status does."""
    known = {condition.type: condition for condition in old}
    return [_condition(known.get(claim.type), claim, generation, now) for claim in claims]


def with_claim(old: Sequence[Condition], claim: Claim, generation: int, now: datetime) -> list[Condition]:
    """What was claimed before, with this in its place."""
    known = {condition.type: condition for condition in old}
    new = _condition(known.get(claim.type), claim, generation, now)
    return list((known | {claim.type: new}).values())


def _condition(old: Condition | None, claim: Claim, generation: int, now: datetime) -> Condition:
    same = old is not None and old.status == claim.status
    text = cut(claim.message, _MESSAGE_CHARACTERS)
    return Condition(
        type=claim.type,
        status=claim.status,
        reason=claim.reason,
        message=old.message if old and old.message == sentence_for(text) else text,
        last_transition_time=old.last_transition_time if old and same else clock.to_text(now),
        observed_generation=generation,
    )

"""One event for each transition, found by comparing the status before with the status after. Pure.

The name of an event follows from what it tells, so posting it again after a crash meets the one that is there.
Stage and attempt never go back, so the names sort in the order of the transitions: kubectl shows the events of one
second in that order.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any, Literal

from pseudoreal_api.base import API_VERSION, KIND
from pseudoreal_api.spec import JobMetadata
from pseudoreal_api.status import PhaseStatus, PseudoRealJobStatus

from pseudoreal_operator import clock
from pseudoreal_operator.conditions import find, holds

COMPONENT = "pseudoreal-operator"
_MESSAGE_CHARACTERS = 1000
"""Kubernetes takes 1024 bytes."""


class Reason(StrEnum):
    """In the order in which they can follow one another within one attempt at one stage."""

    ACCEPTED = "Accepted"
    RESUMED = "Resumed"
    RESTART_STARTED = "RestartStarted"
    DELINK_STARTED = "DelinkStarted"
    DELINK_COMPLETED = "DelinkCompleted"
    PHASE_STARTED = "PhaseStarted"
    PHASE_SUCCEEDED = "PhaseSucceeded"
    ATTEMPT_FAILED = "AttemptFailed"
    SUSPENDED = "Suspended"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"


_ORDER = tuple(Reason)
_FIRST, _LAST = 0, 9999
"""In place of an attempt's number, for what happens once in a stage: before and after all its attempts."""


@dataclass(frozen=True)
class Event:
    """`stage` and `attempt` say when it happened, and with `reason` what."""

    reason: Reason
    message: str
    stage: int
    attempt: int
    type: Literal["Normal", "Warning"] = "Normal"

    def name(self, job: JobMetadata) -> str:
        place = f"{self.stage:02}-{self.attempt:04}-{_ORDER.index(self.reason):02}"
        return f"{job.name}.{job.uid[:8]}.{place}-{self.reason.lower()}"


def transitions(old: PseudoRealJobStatus, new: PseudoRealJobStatus) -> list[Event]:
    """In the order in which they happened."""
    if not old.conditions and holds(new, "Accepted"):
        return [Event(Reason.ACCEPTED, "The job is valid and starts with its first phase.", 0, _FIRST)]
    before = {phase.name: phase for phase in old.phases}
    found = [
        event for index, phase in enumerate(new.phases) for event in _of_phase(index, before.get(phase.name), phase)
    ]
    return [*found, *_of_attempt(old, new), *_of_job(old, new)]


def to_manifest(event: Event, job: JobMetadata, now: datetime, instance: str) -> dict[str, Any]:
    time = clock.to_text(now)
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": event.name(job), "namespace": job.namespace},
        "involvedObject": {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "name": job.name,
            "namespace": job.namespace,
            "uid": job.uid,
        },
        "type": event.type,
        "reason": event.reason.value,
        "message": event.message[:_MESSAGE_CHARACTERS],
        "firstTimestamp": time,
        "lastTimestamp": time,
        "count": 1,
        "source": {"component": COMPONENT},
        "reportingComponent": COMPONENT,
        "reportingInstance": instance,
    }


def _of_phase(index: int, old: PhaseStatus | None, new: PhaseStatus) -> Iterator[Event]:
    delink, train = 2 * index - 1, 2 * index
    reached = _states_reached(old.state if old else "Pending", new.state)
    if index > 0 and "Delinking" in reached:
        yield Event(Reason.DELINK_STARTED, f"The delink into phase {new.name} starts.", delink, _FIRST)
    if index > 0 and new.start_checkpoint and not (old and old.start_checkpoint):
        text = f"Phase {new.name} will start from the delinked checkpoint {new.start_checkpoint}."
        yield Event(Reason.DELINK_COMPLETED, text, delink, _LAST)
    if "Running" in reached:
        yield Event(Reason.PHASE_STARTED, f"Phase {new.name} starts.", train, _FIRST)
    if "Succeeded" in reached:
        yield Event(Reason.PHASE_SUCCEEDED, _result(new), train, _LAST)


def _states_reached(old: str, new: str) -> tuple[str, ...]:
    """Also the states that were passed through while nobody wrote the status."""
    order = ("Pending", "Delinking", "Running", "Succeeded")
    if old not in order or new not in order:
        return ()
    return order[order.index(old) + 1 : order.index(new) + 1]


def _result(phase: PhaseStatus) -> str:
    losses = f"loss {phase.loss}, validation loss {phase.validation_loss}, in nats per token"
    return f"Phase {phase.name} is done at step {phase.step}: {losses}; checkpoint {phase.end_checkpoint}."


def _of_attempt(old: PseudoRealJobStatus, new: PseudoRealJobStatus) -> Iterator[Event]:
    stage = _stage_number(new)
    more = new.execution_attempt > old.execution_attempt
    if old.restart_after and (new.restart_after is None or more) and not holds(new, "Suspended"):
        yield Event(Reason.RESTART_STARTED, f"Execution {old.execution_attempt} starts.", stage, old.execution_attempt)
    if new.execution_attempt > max(1, old.execution_attempt) and not holds(old, "Suspended"):
        text = _message(new, "Progressing")
        yield Event(Reason.ATTEMPT_FAILED, text, stage, old.execution_attempt, type="Warning")


def _of_job(old: PseudoRealJobStatus, new: PseudoRealJobStatus) -> Iterator[Event]:
    stage = _stage_number(new)
    if holds(new, "Suspended") and not holds(old, "Suspended"):
        yield Event(Reason.SUSPENDED, _message(new, "Suspended"), stage, new.execution_attempt)
    if holds(old, "Suspended") and not holds(new, "Suspended"):
        text = f"The job goes on with execution {new.execution_attempt}."
        yield Event(Reason.RESUMED, text, stage, new.execution_attempt)
    if holds(new, "Succeeded") and not holds(old, "Succeeded"):
        yield Event(Reason.SUCCEEDED, _message(new, "Succeeded"), stage, _LAST)
    if holds(new, "Failed") and not holds(old, "Failed"):
        yield Event(Reason.FAILED, _message(new, "Failed"), stage, _LAST, type="Warning")


def _stage_number(status: PseudoRealJobStatus) -> int:
    """Of the newest stage that began: 2 i for the training of phase i, 2 i - 1 for the delink into it."""
    number = 0
    for index, phase in enumerate(status.phases):
        if phase.state == "Delinking":
            number = 2 * index - 1
        elif phase.state != "Pending":
            number = 2 * index
    return number


def _message(status: PseudoRealJobStatus, kind: str) -> str:
    condition = find(status, kind)
    return condition.message if condition else ""

"""One event for each transition, found by comparing the status before with the status after. Pure.

The name of an event follows from what it tells, so posting it again after a crash meets the one that is there.
Stage and execution never go back, except when a phase is trained again, which begins a new round; so the names sort in
the order of the transitions, and kubectl shows the events of one second in that order.
"""

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum
from typing import Any, Literal

from pseudoreal_api.base import API_VERSION, KIND
from pseudoreal_api.spec.job import JobMetadata
from pseudoreal_api.status.status import PhaseStatus, PseudoRealJobStatus

from pseudoreal_operator import clock
from pseudoreal_operator.foreign import cut
from pseudoreal_operator.status.conditions import find, holds

COMPONENT = "pseudoreal-operator"
_MESSAGE_CHARACTERS = 1000
"""Kubernetes takes 1024 bytes."""


class Reason(StrEnum):
    """In the order in which they can follow one another within one execution of one stage."""

    ACCEPTED = "Accepted"
    RESUMED = "Resumed"
    RESTART_STARTED = "RestartStarted"
    DELINK_STARTED = "DelinkStarted"
    DELINK_COMPLETED = "DelinkCompleted"
    PHASE_STARTED = "PhaseStarted"
    FINISH_REQUESTED = "FinishRequested"
    STRAGGLER_DETECTED = "StragglerDetected"
    HANG_DETECTED = "HangDetected"
    PHASE_SUCCEEDED = "PhaseSucceeded"
    PHASE_RESTARTED = "PhaseRestarted"
    DELINK_ROLLED_BACK = "DelinkRolledBack"
    ATTEMPT_FAILED = "AttemptFailed"
    NODE_AVOIDED = "NodeAvoided"
    SUSPENDED = "Suspended"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"


_ORDER = tuple(Reason)
_FIRST, _LAST = 0, 9999
"""In place of an execution's number, for what happens once in a stage: before and after all its executions."""

_STALLED = ("StartStalled", "StepStalled", "CheckpointStalled")


@dataclass(frozen=True)
class Event:
    """`round`, `stage` and `execution` say when it happened, and with `reason` what; `mark` tells those of one moment
    apart. A round is the number of the execution that began to train a phase again, or 0."""

    reason: Reason
    message: str
    stage: int
    execution: int
    type: Literal["Normal", "Warning"] = "Normal"
    mark: str = ""
    round: int = 0

    def name(self, job: JobMetadata) -> str:
        place = f"{self.round:04}-{self.stage:02}-{self.execution:04}-{_ORDER.index(self.reason):02}"
        mark = f"-{self.mark}" if self.mark else ""
        return f"{job.name}.{job.uid[:8]}.{place}-{self.reason.lower()}{mark}"


def transitions(old: PseudoRealJobStatus, new: PseudoRealJobStatus) -> list[Event]:
    """In the order in which they happened."""
    if not old.phases and new.phases:
        return [Event(Reason.ACCEPTED, "The job is valid and starts with its first phase.", 0, _FIRST)]
    before = {phase.name: phase for phase in old.phases}
    found = [
        event for index, phase in enumerate(new.phases) for event in _of_phase(index, before.get(phase.name), phase)
    ]
    found += [*_of_attempt(old, new), *_of_activity(old, new), *_of_job(old, new)]
    number = max((rule.before_attempt for phase in old.phases for rule in phase.discards or ()), default=0)
    return [replace(event, round=number) for event in found]


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
        "message": cut(event.message, _MESSAGE_CHARACTERS),
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
    stage, number = _stage_number(new), old.execution_attempt
    more = new.execution_attempt > number
    if old.restart_after and (new.restart_after is None or more) and not holds(new, "Suspended"):
        yield Event(Reason.RESTART_STARTED, f"Execution {number} starts.", stage, number)
    if new.faults and new.faults[-1:] != old.faults[-1:] and new.faults[-1].reason in _STALLED:
        text = _message(new, "Progressing") or _message(new, "Failed")
        yield Event(Reason.HANG_DETECTED, text, _stage_number(old), max(1, number), "Warning", "restart")
    if new.execution_attempt > max(1, number) and not holds(old, "Suspended"):
        reason, kind = _of_restart(new)
        yield Event(reason, _message(new, "Progressing"), _stage_number(old), max(1, number), type=kind)
    for node in set(new.avoided_nodes) - set(old.avoided_nodes):
        text = f"Faults of this job began on node {node} again and again; its pods go elsewhere if they can."
        yield Event(Reason.NODE_AVOIDED, text, _stage_number(old), max(1, number), "Warning", _marked(node))


def _of_restart(new: PseudoRealJobStatus) -> tuple[Reason, Literal["Normal", "Warning"]]:
    why = find(new, "Progressing")
    if why and why.reason == "TrainingAgain":
        return Reason.PHASE_RESTARTED, "Normal"
    if why and why.reason == "RolledBack":
        return Reason.DELINK_ROLLED_BACK, "Warning"
    return Reason.ATTEMPT_FAILED, "Warning"


def _of_activity(old: PseudoRealJobStatus, new: PseudoRealJobStatus) -> Iterator[Event]:
    """What a running execution is noticed to do. Without the step in their names, there is one event for each clock
    that ran out and each rank that straggled in an execution, however often it is noticed."""
    before, after = find(old, "Progressing"), find(new, "Progressing")
    if after is None or (before and before.reason == after.reason):
        return
    stage, number = _stage_number(new), max(1, new.execution_attempt)
    if after.reason in _STALLED:
        yield Event(Reason.HANG_DETECTED, after.message, stage, number, "Warning", after.reason.lower())
    if after.reason == "Straggling":
        yield Event(Reason.STRAGGLER_DETECTED, after.message, stage, number, "Warning", _digest(after.message))
    if after.reason == "Finishing":
        yield Event(Reason.FINISH_REQUESTED, after.message, stage, number)


def _digest(text: str) -> str:
    """What is said again of the same rank is no new event."""
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _marked(text: str) -> str:
    """A part of an object's name."""
    return re.sub(r"[^a-z0-9.-]", "-", text.lower())[:60].strip("-.")


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

"""Names and manifests of a job's events; the rules decide which events there are. Pure.

The name of an event follows from its content, so posting it again after a crash finds the existing event. `kubectl
describe` sorts events by seconds, and events of one second by name. Execution numbers never decrease, nor do stages
within an execution, so names begin with both.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any

from pseudoreal_api.base import API_VERSION, KIND
from pseudoreal_api.spec.job import JobMetadata

from pseudoreal_operator import clock
from pseudoreal_operator.untrusted_text import shorten

COMPONENT = "pseudoreal-operator"
_MESSAGE_CHARACTERS = 1000
_MESSAGE_BYTES = 1024
"""Maximum bytes of a message: Kubernetes' limit for events with an eventTime."""
_DETAIL_CHARACTERS = 60


class Reason(StrEnum):
    """Reasons of events, in the order in which they can follow one another within one execution of one stage."""

    ACCEPTED = "Accepted"
    RESUMED = "Resumed"
    RESTART_STARTED = "RestartStarted"
    DELINK_STARTED = "DelinkStarted"
    DELINK_COMPLETED = "DelinkCompleted"
    PHASE_STARTED = "PhaseStarted"
    FINISH_REQUESTED = "FinishRequested"
    STRAGGLER_DETECTED = "StragglerDetected"
    HANG_DETECTED = "HangDetected"
    RESTARTED_IN_PLACE = "RestartedInPlace"
    SPARE_TOOK_OVER = "SpareTookOver"
    PREEMPTED = "Preempted"
    SIDECAR_ENDED = "SidecarEnded"
    PHASE_COMPLETED = "PhaseCompleted"
    PHASE_REPEATED = "PhaseRepeated"
    PHASE_PROLONGED = "PhaseProlonged"
    SPEC_CHANGED = "SpecChanged"
    RESIZED = "Resized"
    DELINK_ROLLED_BACK = "DelinkRolledBack"
    EXECUTION_FAILED = "ExecutionFailed"
    NODE_AVOIDED = "NodeAvoided"
    NODES_READMITTED = "NodesReadmitted"
    SUSPENDED = "Suspended"
    COMPLETED = "Completed"
    FAILED = "Failed"


_ORDER = tuple(Reason)
_WARNINGS = (
    Reason.STRAGGLER_DETECTED,
    Reason.HANG_DETECTED,
    Reason.RESTARTED_IN_PLACE,
    Reason.SPARE_TOOK_OVER,
    Reason.PREEMPTED,
    Reason.SIDECAR_ENDED,
    Reason.DELINK_ROLLED_BACK,
    Reason.EXECUTION_FAILED,
    Reason.NODE_AVOIDED,
    Reason.FAILED,
)


@dataclass(frozen=True)
class Event:
    """An event of a job. `stage` counts the job's stages from 0, `execution` its executions from 1; `detail`
    distinguishes events of one reason in one execution of one stage."""

    reason: Reason
    message: str
    stage: int
    execution: int
    detail: str = ""

    def name(self, job: JobMetadata) -> str:
        order = f"{self.execution:04}-{self.stage:02}-{_ORDER.index(self.reason):02}"
        detail = re.sub(r"[^a-z0-9.-]", "-", self.detail.lower())[:_DETAIL_CHARACTERS].strip("-.")
        parts = [order, self.reason.lower(), *([detail] if detail else [])]
        return f"{job.name}.{job.uid[:8]}.{'-'.join(parts)}"


def to_manifests(events: Sequence[Event], job: JobMetadata, now: datetime, instance: str) -> list[dict[str, Any]]:
    """Return the manifests of the events. Their eventTimes are one microsecond apart, to keep the order."""
    moments = [now + timedelta(microseconds=place) for place in range(len(events))]
    return [to_manifest(event, job, moment, instance) for event, moment in zip(events, moments, strict=True)]


def to_manifest(event: Event, job: JobMetadata, now: datetime, instance: str) -> dict[str, Any]:
    seconds = clock.to_text(now)
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
        "type": "Warning" if event.reason in _WARNINGS else "Normal",
        "reason": event.reason.value,
        "action": "Reconcile",
        "message": shortened(event.message),
        "eventTime": clock.to_microseconds(now),
        "firstTimestamp": seconds,
        "lastTimestamp": seconds,
        "count": 1,
        "source": {"component": COMPONENT},
        "reportingComponent": COMPONENT,
        "reportingInstance": instance,
    }


def shortened(message: str) -> str:
    """Return the message, cut to Kubernetes' limit."""
    most = _MESSAGE_CHARACTERS
    while (size := len(shorten(message, most).encode(errors="surrogatepass"))) > _MESSAGE_BYTES:
        most = most * _MESSAGE_BYTES // size - 1
    return shorten(message, most)

"""Copies of a status, or of a phase in it, with some fields changed. Pure.

pydantic's `model_copy` takes names of fields as unchecked strings; here mypy checks the names and their types.
"""

from typing import TypedDict, Unpack

from pseudoreal_api.status.status import (
    CheckpointStatus,
    Condition,
    Discard,
    Elastic,
    Fault,
    PhaseStatus,
    Placement,
    Progress,
    PseudoRealJobStatus,
    Replicas,
    RestartsInPlace,
    Retries,
    Spares,
    Transition,
)
from pseudoreal_api.wire.layout import ChosenLayout


class StatusFields(TypedDict, total=False):
    observed_generation: int
    state: str
    current_phase: str | None
    execution: int
    restarts: int
    restarts_in_place: RestartsInPlace | None
    spares: Spares | None
    faults: list[Fault]
    disruptions: list[Fault]
    retries: Retries | None
    avoided_nodes: list[str]
    served_requests: list[str]
    transition: Transition | None
    execution_time: str | None
    queued_since: str | None
    blocked_since: str | None
    restart_after: str | None
    start_time: str | None
    active_since: str | None
    completion_time: str | None
    placement: Placement | None
    elastic: Elastic | None
    abandoned_execution: int | None
    replicas: Replicas
    progress: Progress | None
    checkpoint: CheckpointStatus | None
    phases: list[PhaseStatus]
    conditions: list[Condition]


class Result(TypedDict, total=False):
    """Fields of a phase that are set at its end."""

    completion_time: str | None
    end_checkpoint: str | None
    step: int | None
    tokens: int | None
    loss: str | None
    start_validation_loss: str | None
    validation_loss: str | None


class PhaseFields(Result, total=False):
    """All fields of a phase except its name."""

    state: str
    start_time: str | None
    start_checkpoint: str | None
    layout: ChosenLayout | None
    discards: list[Discard] | None


def status_with(status: PseudoRealJobStatus, **fields: Unpack[StatusFields]) -> PseudoRealJobStatus:
    return status.model_copy(update=fields)


def phase_with(phase: PhaseStatus, **fields: Unpack[PhaseFields]) -> PhaseStatus:
    return phase.model_copy(update=fields)

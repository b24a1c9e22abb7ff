"""Stages of a job in order (train, delink, train, ...): the current one, its number of workers, and the user's open
requests for phases. Pure.

`status.phases` is the memory: the train stage of a phase is done when the phase is Complete, and the delink into a
phase is done when the phase has a start checkpoint. Children of finished stages may be deleted.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, Unpack

from pseudoreal_api.names import execution_name
from pseudoreal_api.resolved.elastic import resized
from pseudoreal_api.resolved.resolve import last_steps
from pseudoreal_api.spec.job import JobMetadata, PseudoRealJob, PseudoRealJobSpec
from pseudoreal_api.spec.request import Request, RequestType
from pseudoreal_api.status.status import PhaseStatus, PseudoRealJobStatus

from pseudoreal_operator.changes import PhaseFields, phase_with, status_with


class StageKind(StrEnum):
    TRAIN = "train"
    DELINK = "delink"


class Execution(NamedTuple):
    """One numbered attempt at a stage, with its own set of pods. Numbers run over the whole job; labels tie children
    to their execution. A tuple, because a plan compares the executions of 10,000 pods several times."""

    phase: str
    kind: StageKind
    number: int

    def name(self, job: JobMetadata) -> str:
        """Return the name of the Job that this release creates. Jobs of earlier releases have other names, and the
        same labels."""
        return execution_name(job.name, job.uid, self.phase, self.kind, self.number)


Phases = list[PhaseStatus]


@dataclass(frozen=True)
class Stage:
    """A stage of a job. `index`: index of the phase that the stage trains, or delinks into."""

    index: int
    phase: str
    kind: StageKind

    def execution(self, number: int) -> Execution:
        return Execution(self.phase, self.kind, number)

    @property
    def number(self) -> int:
        """Position of the stage in `all_stages`."""
        return 2 * self.index - (self.kind is StageKind.DELINK)

    @property
    def title(self) -> str:
        return f"phase {self.phase}" if self.kind is StageKind.TRAIN else f"the delink into phase {self.phase}"


def all_stages(spec: PseudoRealJobSpec) -> list[Stage]:
    """Return the stages of a job in order."""
    names = [phase.name for phase in spec.phases]
    kinds = (StageKind.DELINK, StageKind.TRAIN)
    return [Stage(index, name, kind) for index, name in enumerate(names) for kind in kinds][1:]


def pending_phases(spec: PseudoRealJobSpec) -> Phases:
    return [PhaseStatus(name=phase.name, state="Pending") for phase in spec.phases]


def current_stage(phases: Phases) -> Stage | None:
    """Return the first stage that is not done; None if all are done."""
    for index, phase in enumerate(phases):
        if phase.state == "Complete":
            continue
        kind = StageKind.DELINK if index > 0 and phase.start_checkpoint is None else StageKind.TRAIN
        return Stage(index, phase.name, kind)
    return None


def is_started(phases: Phases, stage: Stage) -> bool:
    """Return whether the status says that children of the stage were created."""
    return phases[stage.index].state == ("Training" if stage.kind is StageKind.TRAIN else "Delinking")


def last_steps_of(spec: PseudoRealJobSpec, stage: Stage) -> str | None:
    """Return the last step of the phase and of the job, as PHASE/JOB; None for a delink, which does not depend on
    them."""
    ends = last_steps(spec)
    return f"{ends[stage.index]}/{ends[-1]}" if stage.kind is StageKind.TRAIN else None


def with_added_phases(phases: Phases, spec: PseudoRealJobSpec) -> Phases:
    """Return the phases of a status, with the phases that were added to the spec since; empty if the status has
    none."""
    return phases + pending_phases(spec)[len(phases) :] if phases else phases


def has_begun(status: PseudoRealJobStatus) -> bool:
    """Return whether the status says that children of any stage were created."""
    return any(phase.state != "Pending" for phase in status.phases) or status.execution > 1


def with_stage_started(status: PseudoRealJobStatus, stage: Stage) -> PseudoRealJobStatus:
    """Return the status that records the start of the stage's present execution."""
    state = "Training" if stage.kind is StageKind.TRAIN else "Delinking"
    return status_with(status, phases=with_phase_fields(status.phases, stage.index, state=state), restart_after=None)


def with_phase_fields(phases: Phases, index: int, **fields: Unpack[PhaseFields]) -> Phases:
    return [phase_with(phase, **fields) if i == index else phase for i, phase in enumerate(phases)]


def workers_of(spec: PseudoRealJobSpec, status: PseudoRealJobStatus, stage: Stage) -> int:
    """Return the number of workers that an execution of the stage is created with."""
    if stage.kind is StageKind.DELINK:
        return 1
    known = status.elastic
    return known.workers if known and known.phase_name == stage.phase else spec.phases[stage.index].workers


def most_pods(spec: PseudoRealJobSpec) -> dict[str, int]:
    """Return phase name -> maximum number of pods of a training execution: the workers in the spec, which an elastic
    phase never exceeds, and the spare pods."""
    return {phase.name: phase.workers + phase.spares for phase in spec.phases}


def job_at_size(job: PseudoRealJob, status: PseudoRealJobStatus, stage: Stage) -> PseudoRealJob:
    """Return the job with the stage's phase resized to its present number of workers; unchanged for a delink, or if no
    elastic phase is reduced."""
    if stage.kind is StageKind.DELINK or status.elastic is None:
        return job
    spec = resized(job.spec, stage.index, workers_of(job.spec, status, stage))
    return job.model_copy(update={"spec": spec})


def open_requests(spec: PseudoRealJobSpec, status: PseudoRealJobStatus, kind: RequestType) -> list[Request]:
    return [request for request in spec.requests if request.type == kind and request.id not in status.served_requests]


def phases_to_finish(spec: PseudoRealJobSpec, status: PseudoRealJobStatus) -> frozenset[str]:
    """Return the names of the phases that are to end now, or as soon as they train."""
    return frozenset(request.phase for request in open_requests(spec, status, "FinishPhase"))


def with_served(spec: PseudoRealJobSpec, status: PseudoRealJobStatus) -> PseudoRealJobStatus:
    """Return the status with the FinishPhase requests of complete phases marked as served. Ids that the spec no longer
    has are dropped, so that the list stays short."""
    complete = {phase.name for phase in status.phases if phase.state == "Complete"}
    done = {request.id for request in open_requests(spec, status, "FinishPhase") if request.phase in complete}
    served = [one.id for one in spec.requests if one.id in done or one.id in status.served_requests]
    return status_with(status, served_requests=served)

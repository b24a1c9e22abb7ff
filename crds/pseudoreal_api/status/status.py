"""Status of a PseudoRealJob, written by the operator alone. The conditions are authoritative; `state` summarizes
them."""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from pseudoreal_api.base import ATOMIC, SET, ApiModel, list_map
from pseudoreal_api.wire.layout import ChosenLayout
from pseudoreal_api.wire.messages import MOST_SPARES

TIME: dict[str, Any] = {"format": "date-time"}

_Name = Annotated[str, Field(max_length=253)]
"""Name of an object or a checkpoint."""
_Number = Annotated[str, Field(max_length=32)]
"""Decimal number as a string."""
_Word = Annotated[str, Field(max_length=64, pattern="^[A-Z][A-Za-z]*$")]
"""Value of an enumeration open to additions by later releases."""


MOST_RANGES = 1024
"""Maximum number of characters of a list of numbers written as ranges."""
_Ranges = Annotated[str, Field(max_length=MOST_RANGES)]
MOST_NODES = 100
"""Maximum number of nodes listed with their ranks in a status."""


class StatusModel(ApiModel):
    """Part of the status. Fields and enumeration values of a newer operator are ignored."""

    model_config = ConfigDict(extra="ignore")


class Condition(StatusModel):
    """A condition of the job, shaped as metav1.Condition."""

    type: str = Field(
        max_length=316, description="type is Accepted, Progressing, Delinked, Suspended, Complete or Failed."
    )
    status: Literal["True", "False", "Unknown"] = Field(description="status is True, False or Unknown.")
    reason: str = Field(
        max_length=1024,
        description="reason is one word for programs.",
        # Only in the schema, not in the model: an operator must be able to read any stored reason.
        json_schema_extra={"pattern": r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$"},
    )
    message: str = Field(
        max_length=32_768, description="message is a sentence for people: what is the case, and what to do about it."
    )
    last_transition_time: str = Field(
        description="lastTransitionTime is the time at which status last changed.", json_schema_extra=TIME
    )
    observed_generation: int = Field(
        0, description="observedGeneration is the generation of the spec that the condition speaks of."
    )


class Replicas(StatusModel):
    desired: int = Field(0, description="desired is the number of pods that the current phase wants.")
    ready: int = Field(0, description="ready is the number of pods that are running.")
    failed: int = Field(0, description="failed is the number of pods of the newest execution that failed.")


class ExpertLoad(StatusModel):
    largest: _Number = Field(
        description="largest is the tokens of the expert with the most, as a multiple of the mean of its layer's"
        " experts; 1 is balance."
    )
    idle: _Number = Field(description="idle is the share of all experts that no token chose.")
    dropped: _Number = Field(description="dropped is the share of the choices that experts refused, as they were full.")
    router_entropy: _Number = Field(
        description="routerEntropy is the mean entropy of the probabilities that routers give to experts, in nats."
    )


class Progress(StatusModel):
    step: int = Field(description="step is the number of training steps done, from the job's start.")
    total_steps: int | None = Field(
        None, description="totalSteps is the training step at which the last phase ends at the latest."
    )
    percent: int | None = Field(None, description="percent is the share of the training steps that is done.")
    phase_remaining_seconds: int | None = Field(
        None, description="phaseRemainingSeconds is an estimate of the time that the current phase still takes."
    )
    tokens: int = Field(0, description="tokens is the number of tokens trained, from the job's start.")
    loss: _Number | None = Field(None, description="loss is the training loss of the newest step, in nats per token.")
    validation_loss: _Number | None = Field(
        None, description="validationLoss is the newest validation loss, in nats per token."
    )
    tokens_per_second: _Number | None = Field(None, description="tokensPerSecond is the rate over the newest steps.")
    experts: ExpertLoad | None = Field(
        None, description="experts is how the tokens of the newest step spread over experts. Omitted: it has none."
    )
    last_updated_time: str = Field(
        description="lastUpdatedTime is the time at which the operator read these figures.", json_schema_extra=TIME
    )


class CheckpointStatus(StatusModel):
    latest: _Name = Field(description="latest is the name of the newest committed checkpoint that a pod reported.")
    step: int = Field(description="step is the training step of that checkpoint.")
    saved_time: str | None = Field(
        None, description="savedTime is the time at which it was committed.", json_schema_extra=TIME
    )


class Discard(StatusModel):
    """Checkpoints of a phase that must not be resumed from, as the phase is trained again: those of executions before
    beforeExecution and of fromStep or later."""

    before_execution: int = Field(
        description="beforeExecution is the number of an execution: only checkpoints of earlier ones are discarded."
    )
    from_step: int = Field(description="fromStep is the first training step whose checkpoints are discarded.")
    continued: bool = Field(
        True, description="continued says whether checkpoints of the job that this one continues are discarded as well."
    )


class Transition(StatusModel):
    """Transition from one phase to the next by a delink."""

    id: _Name = Field(description="id changes with every new try to reach the next phase.")
    from_phase: _Name = Field(description="fromPhase is the phase that ended.")
    to_phase: _Name = Field(description="toPhase is the phase that is to start.")
    start_time: str = Field(description="startTime is the time at which the transition began.", json_schema_extra=TIME)
    deadline: str = Field(description="deadline is the time at which delink.onTimeout applies.", json_schema_extra=TIME)


class Fault(StatusModel):
    """What ended an execution, or its ranks, before their time."""

    execution: int = Field(description="execution is the number of the execution that the fault ended.")
    time: str = Field(description="time is the time at which the execution ended.", json_schema_extra=TIME)
    reason: str = Field(max_length=1024, description="reason is one word for programs.")
    pod: _Name | None = Field(None, description="pod is the pod in which the fault began.")
    node: _Name | None = Field(None, description="node is the node of that pod.")
    restart_in_place: int | None = Field(
        None,
        description="restartInPlace says that ranks were restarted in the same pods, for which time in that execution."
        " Omitted: the fault ended its pods.",
    )


class RestartsInPlace(StatusModel):
    """Newest execution with restarts of ranks in place."""

    phase: _Name = Field(description="phase is the name of the phase that it trains.")
    execution: int = Field(description="execution is its number.")
    restarts: int = Field(description="restarts is the number of times that its ranks were restarted in place.")
    message: str = Field(max_length=1024, description="message is a sentence on why they were the last time.")


class TakenPlace(StatusModel):
    worker: int = Field(description="worker is the number of the worker whose pod was lost.")
    pod: int = Field(description="pod is the completion index of the pod that has its place.")


class Spares(StatusModel):
    """Newest execution with lost workers replaced by spare pods."""

    phase_name: _Name = Field(description="phaseName is the name of the phase that it trains.")
    execution: int = Field(description="execution is its number.")
    restart: int = Field(description="restart is the number of the restart in place with which the last of them began.")
    own_restarts: int = Field(
        description="ownRestarts is how many more restarts in place its pods may decide on by themselves."
    )
    places: Annotated[list[TakenPlace], Field(max_length=MOST_SPARES)] = Field(
        description="places are those that spare pods have.", json_schema_extra=ATOMIC
    )
    message: str = Field(max_length=1024, description="message is a sentence on the last of them.")


class Retries(StatusModel):
    """Consecutive restarts without a new checkpoint in between, for any reason."""

    restarts: int = Field(description="restarts is their number. The wait before the next restart doubles with each.")
    disruptions: int = Field(
        0, description="disruptions is the number of those that do not count against restart.maxRestarts."
    )
    checkpoint: _Name | None = Field(
        None,
        description="checkpoint is the newest checkpoint since the first of these restarts. Omitted: there is none.",
    )


class NodeRanks(StatusModel):
    node: _Name = Field(description="node is the name of the node.")
    ranks: _Ranges = Field(description="ranks are the numbers of the ranks on the node, such as 0-7,16-23.")
    workers: _Ranges = Field(
        description="workers are the numbers of their pods, in the order of the ranks, each of which has equally many."
    )


class Placement(StatusModel):
    """Nodes of an execution's ranks, current or former."""

    phase_name: _Name = Field(description="phaseName is the name of the phase that they train.")
    execution: int = Field(description="execution is the number of the execution.")
    nodes: Annotated[list[NodeRanks], Field(max_length=MOST_NODES)] = Field(
        description="nodes have these ranks, in the order of the first rank of each.", json_schema_extra=ATOMIC
    )
    omitted_nodes: int = Field(
        0, description="omittedNodes is the number of further nodes with ranks, which are left out."
    )


class Elastic(StatusModel):
    """Elastic phase running with fewer than all workers, or trying to get them back."""

    phase_name: _Name = Field(description="phaseName is the name of the phase.")
    workers: int = Field(description="workers is the number of pods that the newest execution wants.")
    since: str = Field(
        description="since is the time since which the phase has not had all of its workers.", json_schema_extra=TIME
    )
    grow_after: str | None = Field(
        None,
        description="growAfter is the time from which on more workers are tried. Omitted: they are being tried, or a"
        " queue decides on them.",
        json_schema_extra=TIME,
    )
    message: str = Field(max_length=1024, description="message is a sentence on why it has so many workers.")


class PhaseStatus(StatusModel):
    """What became of one phase. Results come from the pods' termination messages."""

    name: _Name = Field(description="name is the name of the phase in the spec.")
    state: _Word = Field(description="state is Pending, Delinking, Training, Complete or Failed. More words may come.")
    start_time: str | None = Field(
        None, description="startTime is the time at which the phase was first begun.", json_schema_extra=TIME
    )
    completion_time: str | None = Field(
        None, description="completionTime is the time at which the phase ended.", json_schema_extra=TIME
    )
    start_checkpoint: _Name | None = Field(
        None,
        description="startCheckpoint is the checkpoint that the phase started from. Omitted: it started from"
        " random weights.",
    )
    discards: Annotated[list[Discard], Field(max_length=100)] | None = Field(
        None,
        description="discards are checkpoints that are not resumed from. Omitted: there are none.",
        json_schema_extra=ATOMIC,
    )
    layout: ChosenLayout | None = Field(
        None,
        description="layout is what the phase was given by layout Auto, which changes with its number of ranks alone."
        " Omitted: the job says it itself, or it is not chosen yet.",
    )
    end_checkpoint: _Name | None = Field(None, description="endCheckpoint is the checkpoint at the end of the phase.")
    step: int | None = Field(
        None, description="step is the training step at the end of the phase, counted from the job's start."
    )
    tokens: int | None = Field(
        None, description="tokens is the number of tokens at the end of the phase, counted from the job's start."
    )
    loss: _Number | None = Field(
        None, description="loss is the training loss of the phase's last step, in nats per token."
    )
    start_validation_loss: _Number | None = Field(
        None, description="startValidationLoss is the validation loss before the phase's first step, in nats per token."
    )
    validation_loss: _Number | None = Field(
        None, description="validationLoss is the validation loss at the end of the phase, in nats per token."
    )


class PseudoRealJobStatus(StatusModel):
    conditions: Annotated[list[Condition], Field(max_length=32)] = Field(
        [],
        description="conditions are the state of the job; they are the truth for programs.",
        json_schema_extra=list_map("type"),
    )
    observed_generation: int = Field(
        0, description="observedGeneration is the generation of the spec that this status speaks of."
    )
    state: _Word = Field(
        "Pending",
        description="state is a summary for people: Pending, Queued, Training, Delinking, Restarting, Suspended,"
        " Complete or Failed. More words may come; programs read the conditions.",
    )
    current_phase: _Name | None = Field(
        None, description="currentPhase is the name of the phase that trains, or is about to. Omitted: none does."
    )
    execution: int = Field(
        0,
        description="execution is the number of the newest set of pods, after faults, disruptions and resumes; it is"
        " part of their names.",
    )
    restarts: int = Field(0, description="restarts is the number of restarts after faults, from the job's start.")
    restarts_in_place: RestartsInPlace | None = Field(
        None,
        description="restartsInPlace says how often ranks were restarted in pods that lived on. Each time is among"
        " restarts. Omitted: they never were.",
    )
    spares: Spares | None = Field(
        None,
        description="spares says which places spare pods took. Omitted: they never took one.",
    )
    faults: Annotated[list[Fault], Field(max_length=100)] = Field(
        [],
        description="faults are the newest faults, as far as restart.windowSeconds and avoidNodesAfter need them.",
        json_schema_extra=ATOMIC,
    )
    disruptions: Annotated[list[Fault], Field(max_length=100)] = Field(
        [],
        description="disruptions are the newest disruptions that a node may be to blame for, as far as"
        " avoidNodesAfter needs them.",
        json_schema_extra=ATOMIC,
    )
    retries: Retries | None = Field(
        None,
        description="retries counts restarts without a new checkpoint between them. Omitted: there was a new"
        " checkpoint since the last restart.",
    )
    avoided_nodes: Annotated[list[_Name], Field(max_length=100)] = Field(
        [],
        description="avoidedNodes are nodes where faults of this job began again and again; its pods go elsewhere"
        " if they can.",
        json_schema_extra=SET,
    )
    served_requests: Annotated[list[Annotated[str, Field(max_length=64)]], Field(max_length=100)] = Field(
        [],
        description="servedRequests are the ids of spec.requests that were served, or that could not be.",
        json_schema_extra=SET,
    )
    transition: Transition | None = Field(
        None, description="transition is set while the job goes from one phase to the next."
    )
    execution_time: str | None = Field(
        None,
        description="executionTime is the time at which the newest set of pods was asked for, or last admitted by"
        " its queue.",
        json_schema_extra=TIME,
    )
    queued_since: str | None = Field(
        None,
        description="queuedSince is the time since which a queue holds the newest set of pods; deadlines stand"
        " still meanwhile. Omitted: no queue holds it.",
        json_schema_extra=TIME,
    )
    blocked_since: str | None = Field(
        None,
        description="blockedSince is the time since which the API server refuses what the job needs; the"
        " operator asks less and less often. Omitted: it refuses nothing.",
        json_schema_extra=TIME,
    )
    restart_after: str | None = Field(
        None, description="restartAfter is the time before which no new execution starts.", json_schema_extra=TIME
    )
    start_time: str | None = Field(
        None, description="startTime is the time at which the job was first seen.", json_schema_extra=TIME
    )
    active_since: str | None = Field(
        None,
        description="activeSince is the time at which the job was first seen or last resumed, moved later by the"
        " time that a queue held it since.",
        json_schema_extra=TIME,
    )
    completion_time: str | None = Field(
        None, description="completionTime is the time at which the job succeeded or failed.", json_schema_extra=TIME
    )
    placement: Placement | None = Field(
        None,
        description="placement says on which node each rank of the newest execution is whose pods all had a node."
        " Omitted: there was none yet.",
    )
    elastic: Elastic | None = Field(
        None,
        description="elastic says with how many workers an elastic phase trains, and why. Omitted: with all of them.",
    )
    abandoned_execution: int | None = Field(
        None,
        description="abandonedExecution is the number of the newest execution whose pods on lost nodes are not waited"
        " for any more. Omitted: all pods are waited for.",
    )
    replicas: Replicas = Field(Replicas(), description="replicas counts the pods of the current phase.")
    progress: Progress | None = Field(None, description="progress says how far the training is.")
    checkpoint: CheckpointStatus | None = Field(None, description="checkpoint is the newest committed checkpoint.")
    phases: Annotated[list[PhaseStatus], Field(max_length=16)] = Field(
        [], description="phases says what became of each phase.", json_schema_extra=list_map("name")
    )

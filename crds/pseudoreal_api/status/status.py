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
    status: Literal["True", "False", "Unknown"] = Field(
        description="status says whether the condition holds: True, False or Unknown."
    )
    reason: str = Field(
        max_length=1024,
        description="reason is one word for programs that says why status has its value.",
        # Only in the schema, not in the model: an operator must be able to read any stored reason.
        json_schema_extra={"pattern": r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$"},
    )
    message: str = Field(
        max_length=32_768, description="message is a sentence for people: what happened, and what to do about it."
    )
    last_transition_time: str = Field(
        description="lastTransitionTime is the time at which status last changed.", json_schema_extra=TIME
    )
    observed_generation: int = Field(
        0, description="observedGeneration is the metadata.generation of the spec to which the condition applies."
    )


class Replicas(StatusModel):
    desired: int = Field(0, description="desired is the number of pods that the current phase should have.")
    ready: int = Field(0, description="ready is the number of these pods that run.")
    failed: int = Field(0, description="failed is the number of pods of the newest execution that failed.")


class ExpertLoad(StatusModel):
    largest: _Number = Field(
        description="largest is the largest load of an expert: its number of tokens, divided by the mean of the"
        " experts of its layer. 1 is perfect balance."
    )
    idle: _Number = Field(description="idle is the fraction of all experts to which no token was routed.")
    dropped: _Number = Field(description="dropped is the fraction of routing choices that full experts refused.")
    router_entropy: _Number = Field(
        description="routerEntropy is the mean entropy, in nats, of the probabilities that routers assign to"
        " experts. 0: each token has one clear expert."
    )


class Progress(StatusModel):
    step: int = Field(description="step is the number of completed training steps, counted from the start of the job.")
    total_steps: int | None = Field(
        None, description="totalSteps is the training step at which the last phase ends if nothing ends a phase early."
    )
    percent: int | None = Field(None, description="percent is step as a percentage of totalSteps.")
    phase_remaining_seconds: int | None = Field(
        None, description="phaseRemainingSeconds is the estimated time, in seconds, until the current phase ends."
    )
    tokens: int = Field(0, description="tokens is the number of trained tokens, counted from the start of the job.")
    loss: _Number | None = Field(None, description="loss is the training loss of the newest step, in nats per token.")
    validation_loss: _Number | None = Field(
        None, description="validationLoss is the newest validation loss, in nats per token."
    )
    tokens_per_second: _Number | None = Field(
        None,
        description="tokensPerSecond is the number of trained tokens per second, over the newest steps and all ranks.",
    )
    experts: ExpertLoad | None = Field(
        None,
        description="experts says how evenly the tokens of the newest step were distributed over experts. Omitted:"
        " the model has no experts, or no step was reported.",
    )
    last_updated_time: str = Field(
        description="lastUpdatedTime is the time at which the operator read these numbers.", json_schema_extra=TIME
    )


class CheckpointStatus(StatusModel):
    latest: _Name = Field(description="latest is the name of the newest committed checkpoint that a pod reported.")
    step: int = Field(description="step is the training step of that checkpoint.")
    saved_time: str | None = Field(
        None, description="savedTime is the time at which this checkpoint was committed.", json_schema_extra=TIME
    )


class Discard(StatusModel):
    """Checkpoints of a phase that must not be resumed from, as the phase is trained again: those of executions before
    beforeExecution and of fromStep or later."""

    before_execution: int = Field(
        description="beforeExecution is the number of an execution. Only checkpoints of executions with a smaller"
        " number are discarded."
    )
    from_step: int = Field(
        description="fromStep is the first training step whose checkpoint is discarded; checkpoints of earlier"
        " steps stay valid."
    )
    continued: bool = Field(
        True,
        description="continued says whether checkpoints of the job named by checkpoint.continueFrom are discarded"
        " as well.",
    )


class Transition(StatusModel):
    """Transition from one phase to the next by a delink."""

    id: _Name = Field(description="id identifies this attempt to reach the next phase; each new attempt has a new id.")
    from_phase: _Name = Field(description="fromPhase is the name of the phase that ended.")
    to_phase: _Name = Field(description="toPhase is the name of the phase that starts next.")
    start_time: str = Field(
        description="startTime is the time at which the transition started.", json_schema_extra=TIME
    )
    deadline: str = Field(
        description="deadline is the time after which delink.onTimeout applies.", json_schema_extra=TIME
    )


class Fault(StatusModel):
    """What ended an execution, or its ranks, before their time."""

    execution: int = Field(
        description="execution is the number of the execution that the fault or disruption interrupted."
    )
    time: str = Field(description="time is the time of the interruption.", json_schema_extra=TIME)
    reason: str = Field(max_length=1024, description="reason is one word for programs that says what happened.")
    pod: _Name | None = Field(None, description="pod is the name of the pod in which it began. Omitted: unknown.")
    node: _Name | None = Field(None, description="node is the node of that pod. Omitted: unknown.")
    restart_in_place: int | None = Field(
        None,
        description="restartInPlace is the number of the restart in place that followed, counted within the"
        " execution from 1. Omitted: the pods were created again.",
    )


class RestartsInPlace(StatusModel):
    """Newest execution with restarts of ranks in place."""

    phase: _Name = Field(description="phase is the name of the phase that this execution trains.")
    execution: int = Field(
        description="execution is the number of the newest execution whose ranks restarted in place."
    )
    restarts: int = Field(description="restarts is the number of restarts in place of this execution.")
    message: str = Field(
        max_length=1024, description="message is a sentence that says why the ranks restarted the last time."
    )


class TakenPlace(StatusModel):
    worker: int = Field(description="worker is the number of the worker whose pod was lost.")
    pod: int = Field(description="pod is the completion index of the spare pod that replaces the worker.")


class Spares(StatusModel):
    """Newest execution with lost workers replaced by spare pods."""

    phase_name: _Name = Field(description="phaseName is the name of the phase that this execution trains.")
    execution: int = Field(
        description="execution is the number of the newest execution in which spare pods replaced workers."
    )
    restart: int = Field(
        description="restart is the number of the restart in place in which the last replacement took effect."
    )
    own_restarts: int = Field(
        description="ownRestarts is the number of further restarts in place that the pods may start without the"
        " operator."
    )
    places: Annotated[list[TakenPlace], Field(max_length=MOST_SPARES)] = Field(
        description="places lists the replaced workers and the spare pods that replace them.", json_schema_extra=ATOMIC
    )
    message: str = Field(max_length=1024, description="message is a sentence about the last replacement.")


class Retries(StatusModel):
    """Consecutive restarts without a new checkpoint in between, for any reason."""

    restarts: int = Field(
        description="restarts is the number of consecutive restarts without a new checkpoint, for any reason. The"
        " wait before the next restart doubles with each."
    )
    disruptions: int = Field(
        0, description="disruptions is the number of these restarts that do not count against restart.maxRestarts."
    )
    checkpoint: _Name | None = Field(
        None,
        description="checkpoint is the newest checkpoint at the time of the first of these restarts; a newer one"
        " resets the numbers. Omitted: there was none.",
    )


class NodeRanks(StatusModel):
    node: _Name = Field(description="node is the name of the node.")
    ranks: _Ranges = Field(description="ranks are the numbers of the ranks on this node, as ranges such as 0-7,16-23.")
    workers: _Ranges = Field(
        description="workers are the numbers of the workers on this node, in the order of their ranks. Each worker"
        " has the same number of ranks."
    )


class Placement(StatusModel):
    """Nodes of an execution's ranks, current or former."""

    phase_name: _Name = Field(description="phaseName is the name of the phase that the execution trains.")
    execution: int = Field(description="execution is the number of the execution whose placement this is.")
    nodes: Annotated[list[NodeRanks], Field(max_length=MOST_NODES)] = Field(
        description="nodes lists the nodes with their ranks, in the order of each node's first rank. At most 100"
        " nodes are listed.",
        json_schema_extra=ATOMIC,
    )
    omitted_nodes: int = Field(0, description="omittedNodes is the number of nodes with ranks that are not listed.")


class Elastic(StatusModel):
    """Elastic phase running with fewer than all workers, or trying to get them back."""

    phase_name: _Name = Field(description="phaseName is the name of the elastic phase.")
    workers: int = Field(description="workers is the number of pods that the newest execution should have.")
    since: str = Field(
        description="since is the time since which the phase has had fewer than all of its workers.",
        json_schema_extra=TIME,
    )
    grow_after: str | None = Field(
        None,
        description="growAfter is the time after which the operator tries more workers. Omitted: it is trying now,"
        " or a queue decides.",
        json_schema_extra=TIME,
    )
    message: str = Field(
        max_length=1024, description="message is a sentence that says why the phase has this number of workers."
    )


class PhaseStatus(StatusModel):
    """What became of one phase. Results come from the pods' termination messages."""

    name: _Name = Field(description="name is the name of the phase in the spec.")
    state: _Word = Field(
        description="state is Pending, Delinking, Training, Complete or Failed. Later releases may add values."
    )
    start_time: str | None = Field(
        None,
        description="startTime is the time at which the phase first started. Omitted: it has not started.",
        json_schema_extra=TIME,
    )
    completion_time: str | None = Field(
        None,
        description="completionTime is the time at which the phase ended. Omitted: it has not ended.",
        json_schema_extra=TIME,
    )
    start_checkpoint: _Name | None = Field(
        None,
        description="startCheckpoint is the checkpoint from which the phase started. Omitted: it started from"
        " initial weights, or has not started.",
    )
    discards: Annotated[list[Discard], Field(max_length=100)] | None = Field(
        None,
        description="discards lists checkpoints of the phase from which it must not resume, because the phase is"
        " trained again. Omitted: there are none.",
        json_schema_extra=ATOMIC,
    )
    layout: ChosenLayout | None = Field(
        None,
        description="layout is the layout that parallelism.layout Auto chose. It changes only if the number of"
        " ranks changes. Omitted: the spec gives the layout, or it is not chosen yet.",
    )
    end_checkpoint: _Name | None = Field(
        None, description="endCheckpoint is the checkpoint at the end of the phase. Omitted: the phase has not ended."
    )
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
        description="conditions are the state of the job for programs: what `kubectl wait` and other controllers read.",
        json_schema_extra=list_map("type"),
    )
    observed_generation: int = Field(
        0,
        description="observedGeneration is the metadata.generation of the spec to which this status applies. If it"
        " is smaller than metadata.generation, the operator has not yet seen the newest change.",
    )
    state: _Word = Field(
        "Pending",
        description="state is a summary for people: Pending, Queued, Training, Delinking, Restarting, Suspended,"
        " Complete or Failed. Later releases may add values; programs should read the conditions.",
    )
    current_phase: _Name | None = Field(
        None,
        description="currentPhase is the name of the phase that trains now or is to train next. Omitted: there is"
        " none.",
    )
    execution: int = Field(
        0,
        description="execution is the number of the newest execution (set of pods). It rises each time pods have to"
        " be created again: after faults, disruptions and resumes. Names of pods contain it.",
    )
    restarts: int = Field(
        0,
        description="restarts is the number of restarts after faults, restarts in place included, since the start"
        " of the job.",
    )
    restarts_in_place: RestartsInPlace | None = Field(
        None,
        description="restartsInPlace describes the newest execution whose ranks restarted inside their existing"
        " pods. These restarts are included in restarts. Omitted: there was none.",
    )
    spares: Spares | None = Field(
        None,
        description="spares describes the newest execution in which spare pods replaced lost workers. Omitted:"
        " there was none.",
    )
    faults: Annotated[list[Fault], Field(max_length=100)] = Field(
        [],
        description="faults are the newest faults, as many as restart.windowSeconds and restart.avoidNodesAfter need.",
        json_schema_extra=ATOMIC,
    )
    disruptions: Annotated[list[Fault], Field(max_length=100)] = Field(
        [],
        description="disruptions are the newest disruptions that may be the fault of a node, as many as"
        " restart.avoidNodesAfter needs.",
        json_schema_extra=ATOMIC,
    )
    retries: Retries | None = Field(
        None,
        description="retries counts consecutive restarts without a new checkpoint between them. Omitted: there was"
        " no restart since the newest checkpoint.",
    )
    avoided_nodes: Annotated[list[_Name], Field(max_length=100)] = Field(
        [],
        description="avoidedNodes are nodes on which several faults of this job began (restart.avoidNodesAfter)."
        " Its pods run on other nodes if there is room.",
        json_schema_extra=SET,
    )
    served_requests: Annotated[list[Annotated[str, Field(max_length=64)]], Field(max_length=100)] = Field(
        [],
        description="servedRequests are the ids of entries of spec.requests that were carried out, or that turned"
        " out to be impossible.",
        json_schema_extra=SET,
    )
    transition: Transition | None = Field(
        None, description="transition describes the transition from one phase to the next. Omitted: there is none now."
    )
    execution_time: str | None = Field(
        None,
        description="executionTime is the time at which the newest execution was created, or last admitted by its"
        " queue.",
        json_schema_extra=TIME,
    )
    queued_since: str | None = Field(
        None,
        description="queuedSince is the time since which the newest execution waits in a queue. Deadlines do not"
        " run meanwhile. Omitted: it does not wait in a queue.",
        json_schema_extra=TIME,
    )
    blocked_since: str | None = Field(
        None,
        description="blockedSince is the time since which the API server rejects an object that the job needs. The"
        " operator retries at growing intervals. Omitted: nothing is rejected.",
        json_schema_extra=TIME,
    )
    restart_after: str | None = Field(
        None,
        description="restartAfter is the time before which no new execution is created (restart.backoffSeconds)."
        " Omitted: no restart waits.",
        json_schema_extra=TIME,
    )
    start_time: str | None = Field(
        None, description="startTime is the time at which the operator first saw the job.", json_schema_extra=TIME
    )
    active_since: str | None = Field(
        None,
        description="activeSince is the time from which deadlines.activeSeconds counts: the start or last resume of"
        " the job, plus the time in a queue since then.",
        json_schema_extra=TIME,
    )
    completion_time: str | None = Field(
        None,
        description="completionTime is the time at which the job completed or failed. Omitted: it has not ended.",
        json_schema_extra=TIME,
    )
    placement: Placement | None = Field(
        None,
        description="placement says on which nodes the ranks run or ran: in the newest execution in which every pod"
        " got a node. Omitted: there was none.",
    )
    elastic: Elastic | None = Field(
        None,
        description="elastic says with how many workers an elastic phase trains, and why. Omitted: no elastic phase"
        " lacks workers.",
    )
    abandoned_execution: int | None = Field(
        None,
        description="abandonedExecution is the number of the newest execution whose pods on lost nodes the operator"
        " no longer waits for. Omitted: it waits for all pods.",
    )
    replicas: Replicas = Field(Replicas(), description="replicas counts the pods of the current phase.")
    progress: Progress | None = Field(
        None, description="progress says how far the training is. Omitted: no pod has reported a step."
    )
    checkpoint: CheckpointStatus | None = Field(
        None, description="checkpoint is the newest committed checkpoint. Omitted: there is none."
    )
    phases: Annotated[list[PhaseStatus], Field(max_length=16)] = Field(
        [], description="phases lists the state and the results of each phase.", json_schema_extra=list_map("name")
    )

"""The status of a PseudoRealJob, written by the operator alone. Conditions are the truth; `phase` is their summary."""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, field_validator, model_validator

from pseudoreal_api.base import ApiModel, list_map
from pseudoreal_api.spec.recovery import RestartFrom

TIME: dict[str, Any] = {"format": "date-time"}


class StatusModel(ApiModel):
    """A part of the status. Fields and words that a newer operator has written are ignored."""

    model_config = ConfigDict(extra="ignore")


class Condition(StatusModel):
    """A condition of the job, shaped as metav1.Condition."""

    type: str = Field(
        max_length=316, description="type is Accepted, Progressing, Delinked, Suspended, Succeeded or Failed."
    )
    status: Literal["True", "False", "Unknown"] = Field(description="status is True, False or Unknown.")
    reason: str = Field(max_length=1024, description="reason is one word for programs.")
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
    failed: int = Field(0, description="failed is the number of pods of the current attempt that failed.")


class Progress(StatusModel):
    step: int = Field(description="step is the number of training steps done, from the job's start.")
    total_steps: int | None = Field(
        None, description="totalSteps is the training step at which the last phase ends at the latest."
    )
    percent: int | None = Field(None, description="percent is the share of the training steps that is done.")
    remaining_seconds: int | None = Field(
        None, description="remainingSeconds is an estimate of the time that the current phase still takes."
    )
    tokens: int = Field(0, description="tokens is the number of tokens trained, from the job's start.")
    loss: str | None = Field(None, description="loss is the training loss of the newest step, in nats per token.")
    validation_loss: str | None = Field(
        None, description="validationLoss is the newest validation loss, in nats per token."
    )
    tokens_per_second: str | None = Field(None, description="tokensPerSecond is the rate over the newest steps.")
    last_updated_time: str = Field(
        description="lastUpdatedTime is the time at which the operator read these figures.", json_schema_extra=TIME
    )


class CheckpointStatus(StatusModel):
    latest: str = Field(description="latest is the name of the newest committed checkpoint that a pod reported.")
    step: int = Field(description="step is the training step of that checkpoint.")
    saved_time: str | None = Field(
        None, description="savedTime is the time at which it was committed.", json_schema_extra=TIME
    )


class Discard(StatusModel):
    """Checkpoints of a phase that must not be resumed from, as the phase is trained again: those of executions before
    beforeAttempt and of fromStep or later."""

    before_attempt: int = Field(
        description="beforeAttempt is the number of an execution: only checkpoints of earlier executions are discarded."
    )
    from_step: int = Field(description="fromStep is the first training step whose checkpoints are discarded.")
    continued: bool = Field(
        True, description="continued says whether checkpoints of the job that this one continues are discarded as well."
    )


class Transition(StatusModel):
    """The way from one phase to the next, by a delink."""

    id: str = Field(description="id changes with every new try to reach the next phase.")
    from_phase: str = Field(description="fromPhase is the phase that ended.")
    to_phase: str = Field(description="toPhase is the phase that is to start.")
    start_time: str = Field(description="startTime is the time at which the transition began.", json_schema_extra=TIME)
    deadline: str = Field(description="deadline is the time at which delink.onTimeout applies.", json_schema_extra=TIME)


class Fault(StatusModel):
    """What ended an execution before its time."""

    attempt: int = Field(description="attempt is the number of the execution that the fault ended.")
    time: str = Field(description="time is the time at which the execution ended.", json_schema_extra=TIME)
    reason: str = Field(description="reason is one word for programs.")
    pod: str | None = Field(None, description="pod is the pod in which the fault began.")
    node: str | None = Field(None, description="node is the node of that pod.")


class Retries(StatusModel):
    """Restarts without a new checkpoint between them, whatever ended their executions."""

    restarts: int = Field(description="restarts is their number. The wait before the next restart doubles with each.")
    disruptions: int = Field(
        0, description="disruptions is the number of those that do not count against restart.maxRestarts."
    )
    checkpoint: str | None = Field(
        None,
        description="checkpoint is the newest checkpoint since the first of these restarts. Omitted: there is none.",
    )


class PhaseStatus(StatusModel):
    """What became of one phase. Results come from the pods' termination messages."""

    name: str = Field(description="name is the name of the phase in the spec.")
    state: str = Field(
        description="state is Pending, Delinking, Running, Succeeded or Failed. More words may come.",
        max_length=64,
        pattern="^[A-Z][A-Za-z]*$",
    )
    start_checkpoint: str | None = Field(
        None,
        description="startCheckpoint is the checkpoint that the phase started from. Omitted: it started from"
        " random weights.",
    )
    discards: list[Discard] | None = Field(
        None, description="discards are checkpoints that are not resumed from. Omitted: there are none."
    )
    end_checkpoint: str | None = Field(None, description="endCheckpoint is the checkpoint at the end of the phase.")
    step: int | None = Field(
        None, description="step is the training step at the end of the phase, counted from the job's start."
    )
    tokens: int | None = Field(
        None, description="tokens is the number of tokens at the end of the phase, counted from the job's start."
    )
    loss: str | None = Field(None, description="loss is the training loss of the phase's last step, in nats per token.")
    start_validation_loss: str | None = Field(
        None, description="startValidationLoss is the validation loss before the phase's first step, in nats per token."
    )
    validation_loss: str | None = Field(
        None, description="validationLoss is the validation loss at the end of the phase, in nats per token."
    )


class PseudoRealJobStatus(StatusModel):
    @model_validator(mode="before")
    @classmethod
    def _read_older(cls, data: Any) -> Any:
        """The status in this release's words. Release 0.1.0 called executionAttempt attempt, and restarts had no number
        of their own."""
        known = isinstance(data, dict) and data.keys() & {"executionAttempt", "execution_attempt"}
        if isinstance(data, dict) and data.get("attempt") and not known:
            return data | {"executionAttempt": data["attempt"], "attempt": 1 + data.get("restarts", 0)}
        return data

    @field_validator("restarted_from", mode="before")
    @classmethod
    def _read_newer(cls, data: Any) -> Any:
        """The request without fields of a later release: it is a copy of a part of the spec, whose model refuses
        unknown fields."""
        return {key: data[key] for key in ("phase", "request") if key in data} if isinstance(data, dict) else data

    observed_generation: int = Field(
        0, description="observedGeneration is the generation of the spec that this status speaks of."
    )
    phase: str = Field(
        "Pending",
        description="phase is a summary for people: Pending, Delinking, Restarting, Suspended, Succeeded, Failed"
        " or the name of the phase that trains. More words may come; programs read the conditions.",
    )
    execution_attempt: int = Field(
        0,
        description="executionAttempt is the number of the newest set of pods, after faults, disruptions and"
        " resumes; it is part of their names.",
    )
    attempt: int = Field(0, description="attempt is 1, and one more with each restart after a fault.")
    restarts: int = Field(0, description="restarts is the number of restarts after faults, from the job's start.")
    faults: Annotated[list[Fault], Field(max_length=100)] = Field(
        [], description="faults are the newest faults, as far as restart.windowSeconds and avoidNodesAfter need them."
    )
    disruptions: Annotated[list[Fault], Field(max_length=100)] = Field(
        [],
        description="disruptions are the newest disruptions that a node may be to blame for, as far as"
        " avoidNodesAfter needs them.",
    )
    retries: Retries | None = Field(
        None,
        description="retries counts restarts without a new checkpoint between them. Omitted: there was a new"
        " checkpoint since the last restart.",
    )
    avoided_nodes: Annotated[list[str], Field(max_length=100)] = Field(
        [],
        description="avoidedNodes are nodes where faults of this job began again and again; its pods go elsewhere"
        " if they can.",
    )
    restarted_from: RestartFrom | None = Field(
        None, description="restartedFrom is the newest spec.restartFrom that was served."
    )
    transition: Transition | None = Field(
        None, description="transition is set while the job goes from one phase to the next."
    )
    attempt_time: str | None = Field(
        None,
        description="attemptTime is the time at which the newest set of pods was asked for, or last admitted by"
        " its queue.",
        json_schema_extra=TIME,
    )
    queued_since: str | None = Field(
        None,
        description="queuedSince is the time since which a queue holds the newest set of pods; deadlines stand"
        " still meanwhile. Omitted: no queue holds it.",
        json_schema_extra=TIME,
    )
    hindered_since: str | None = Field(
        None,
        description="hinderedSince is the time since which the API server refuses what the job needs; the"
        " operator asks less and less often. Omitted: it refuses nothing.",
        json_schema_extra=TIME,
    )
    restart_after: str | None = Field(
        None, description="restartAfter is the time before which no new attempt starts.", json_schema_extra=TIME
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
    replicas: Replicas = Field(Replicas(), description="replicas counts the pods of the current phase.")
    progress: Progress | None = Field(None, description="progress says how far the training is.")
    checkpoint: CheckpointStatus | None = Field(None, description="checkpoint is the newest committed checkpoint.")
    phases: Annotated[list[PhaseStatus], Field(max_length=16)] = Field(
        [], description="phases says what became of each phase.", json_schema_extra=list_map("name")
    )
    conditions: list[Condition] = Field(
        [],
        description="conditions are the state of the job; they are the truth for programs.",
        json_schema_extra=list_map("type"),
    )

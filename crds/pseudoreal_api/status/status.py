"""The status of a PseudoRealJob, written by the operator alone. Conditions are the truth; `phase` is their summary."""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, field_validator, model_validator

from pseudoreal_api.base import ApiModel, list_map
from pseudoreal_api.spec.recovery import RestartFrom

TIME: dict[str, Any] = {"format": "date-time"}


class StatusModel(ApiModel):
    """A newer operator may have written fields that this one does not know, and words for them."""

    model_config = ConfigDict(extra="ignore")


class Condition(StatusModel):
    """As metav1.Condition."""

    type: str = Field(max_length=316, description="Accepted, Progressing, Delinked, Suspended, Succeeded or Failed.")
    status: Literal["True", "False", "Unknown"] = Field(description="True, False or Unknown.")
    reason: str = Field(max_length=1024, description="One word for programs.")
    message: str = Field(max_length=32_768, description="A sentence for people: what is, and what to do about it.")
    last_transition_time: str = Field(description="When status last changed.", json_schema_extra=TIME)
    observed_generation: int = Field(0, description="The generation of the spec that this speaks of.")


class Replicas(StatusModel):
    desired: int = Field(0, description="Pods that the current phase wants.")
    ready: int = Field(0, description="Pods that are running.")
    failed: int = Field(0, description="Pods of the current attempt that failed.")


class Progress(StatusModel):
    step: int = Field(description="Steps done, from the job's start.")
    total_steps: int | None = Field(None, description="Steps at which the last phase ends at the latest.")
    percent: int | None = Field(None, description="Share of the steps that is done.")
    remaining_seconds: int | None = Field(None, description="Estimate for the current phase.")
    tokens: int = Field(0, description="Tokens trained, from the job's start.")
    loss: str | None = Field(None, description="Training loss of the newest step, in nats per token.")
    validation_loss: str | None = Field(None, description="Newest validation loss, in nats per token.")
    tokens_per_second: str | None = Field(None, description="Rate over the newest steps.")
    last_updated_time: str = Field(description="When this was read.", json_schema_extra=TIME)


class CheckpointStatus(StatusModel):
    latest: str = Field(description="Name of the newest committed checkpoint that a pod reported.")
    step: int = Field(description="Its step.")
    saved_time: str | None = Field(None, description="When it was committed.", json_schema_extra=TIME)


class Discard(StatusModel):
    """Checkpoints of a phase that must not be resumed from, as the phase is trained again."""

    before_attempt: int = Field(description="Those of executions before this one,")
    from_step: int = Field(description="of this step or a later one.")
    continued: bool = Field(True, description="Also those of the job that this one continues.")


class Transition(StatusModel):
    """From one phase to the next, by a delink."""

    id: str = Field(description="Changes with every new try to get there.")
    from_phase: str = Field(description="The phase that ended.")
    to_phase: str = Field(description="The phase that is to start.")
    start_time: str = Field(description="When it began.", json_schema_extra=TIME)
    deadline: str = Field(description="When delink.onTimeout applies.", json_schema_extra=TIME)


class Fault(StatusModel):
    """What ended an execution before its time."""

    attempt: int = Field(description="The execution that it ended.")
    time: str = Field(description="When it ended.", json_schema_extra=TIME)
    reason: str = Field(description="One word.")
    pod: str | None = Field(None, description="Where it began.")
    node: str | None = Field(None, description="The node of that pod.")


class Retries(StatusModel):
    """Restarts without a new checkpoint between them, whatever ended their executions."""

    restarts: int = Field(description="How many. The wait before the next one doubles with each.")
    disruptions: int = Field(0, description="Those of them that do not count against restart.maxRestarts.")
    checkpoint: str | None = Field(None, description="The newest checkpoint meanwhile. Omitted: there is none.")


class PhaseStatus(StatusModel):
    """What became of one phase. Results come from the pods' termination messages."""

    name: str = Field(description="Name of the phase in the spec.")
    state: str = Field(
        description="Where it is: Pending, Delinking, Running, Succeeded or Failed. More words may come.",
        max_length=64,
        pattern="^[A-Z][A-Za-z]*$",
    )
    start_checkpoint: str | None = Field(None, description="Checkpoint that it started from. None: random weights.")
    discards: list[Discard] | None = Field(None, description="What is not resumed from. Omitted: nothing.")
    end_checkpoint: str | None = Field(None, description="Checkpoint at its end.")
    step: int | None = Field(None, description="Step at its end.")
    tokens: int | None = Field(None, description="Tokens at its end.")
    loss: str | None = Field(None, description="Training loss of its last step.")
    start_validation_loss: str | None = Field(None, description="Validation loss before its first step.")
    validation_loss: str | None = Field(None, description="Validation loss at its end.")


class PseudoRealJobStatus(StatusModel):
    @model_validator(mode="before")
    @classmethod
    def _read_older(cls, data: Any) -> Any:
        """Release 0.1.0 called executionAttempt attempt, and restarts had no number of their own."""
        known = isinstance(data, dict) and data.keys() & {"executionAttempt", "execution_attempt"}
        if isinstance(data, dict) and data.get("attempt") and not known:
            return data | {"executionAttempt": data["attempt"], "attempt": 1 + data.get("restarts", 0)}
        return data

    @field_validator("restarted_from", mode="before")
    @classmethod
    def _read_newer(cls, data: Any) -> Any:
        """It is a copy of a part of the spec, which knows its fields only."""
        return {key: data[key] for key in ("phase", "request") if key in data} if isinstance(data, dict) else data

    observed_generation: int = Field(0, description="The generation of the spec that this status speaks of.")
    phase: str = Field(
        "Pending",
        description="Summary for people: Pending, Delinking, Restarting, Suspended, Succeeded, Failed or the name of"
        " the phase that trains. More words may come; programs read the conditions.",
    )
    execution_attempt: int = Field(
        0, description="Number of the newest set of pods, after faults, disruptions and resumes; stands in their names."
    )
    attempt: int = Field(0, description="1, and one more with each restart after a fault.")
    restarts: int = Field(0, description="Restarts after faults, from the job's start.")
    faults: Annotated[list[Fault], Field(max_length=100)] = Field(
        [], description="The newest faults, as far as restart.windowSeconds and avoidNodesAfter need them."
    )
    disruptions: Annotated[list[Fault], Field(max_length=100)] = Field(
        [], description="The newest disruptions that a node may be to blame for, as far as avoidNodesAfter needs them."
    )
    retries: Retries | None = Field(None, description="Omitted: there was a new checkpoint since the last restart.")
    avoided_nodes: Annotated[list[str], Field(max_length=100)] = Field(
        [], description="Where faults of this job began again and again; its pods go elsewhere if they can."
    )
    restarted_from: RestartFrom | None = Field(None, description="The newest spec.restartFrom that was served.")
    transition: Transition | None = Field(None, description="While the job goes from one phase to the next.")
    attempt_time: str | None = Field(
        None,
        description="When the newest set of pods was asked for, or last admitted by its queue.",
        json_schema_extra=TIME,
    )
    queued_since: str | None = Field(
        None,
        description="Since when a queue holds the newest set of pods; deadlines stand still meanwhile. Omitted: none"
        " does.",
        json_schema_extra=TIME,
    )
    hindered_since: str | None = Field(
        None,
        description="Since when the API server refuses what the job needs; it is asked less and less often. Omitted: it"
        " does not.",
        json_schema_extra=TIME,
    )
    restart_after: str | None = Field(
        None, description="No new attempt starts before this time.", json_schema_extra=TIME
    )
    start_time: str | None = Field(None, description="When the job was first seen.", json_schema_extra=TIME)
    active_since: str | None = Field(
        None,
        description="When the job was first seen or last resumed, later by the time that a queue held it since.",
        json_schema_extra=TIME,
    )
    completion_time: str | None = Field(None, description="When it succeeded or failed.", json_schema_extra=TIME)
    replicas: Replicas = Field(Replicas(), description="Pods of the current phase.")
    progress: Progress | None = Field(None, description="How far the training is.")
    checkpoint: CheckpointStatus | None = Field(None, description="The newest checkpoint.")
    phases: Annotated[list[PhaseStatus], Field(max_length=16)] = Field(
        [], description="What became of each phase.", json_schema_extra=list_map("name")
    )
    conditions: list[Condition] = Field(
        [], description="The state of the job; the truth for programs.", json_schema_extra=list_map("type")
    )

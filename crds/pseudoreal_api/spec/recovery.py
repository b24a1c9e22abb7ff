"""The parts of the spec that say what happens when something goes wrong, takes too long or is over."""

from typing import Annotated, Literal

from pydantic import Field

from pseudoreal_api.base import ApiModel, DecimalString

RuleAction = Literal["Restart", "RestartIgnoringLimit", "Fail"]
HangAction = Literal["Event", "Restart", "Fail"]

_Names = Annotated[list[Annotated[str, Field(min_length=1, max_length=128)]], Field(max_length=16)]


class RestartRule(ApiModel):
    """Exactly one of the three lists has entries."""

    on_exit_codes: Annotated[list[Annotated[int, Field(ge=1, le=255)]], Field(max_length=32)] = Field(
        [], description="Exit codes of the trainer container. 71: out of memory, 75: asked to stop, 78: invalid job."
    )
    on_pod_conditions: _Names = Field([], description="Pod conditions that are True, such as DisruptionTarget.")
    on_reasons: _Names = Field(
        [], description="Reasons of the container's end or of the pod's, such as OOMKilled, Evicted or NodeLost."
    )
    action: RuleAction = Field(
        description="Restart: counts against maxRestarts. RestartIgnoringLimit: does not count. Fail: the job fails."
    )


class Restart(ApiModel):
    max_restarts: int = Field(3, ge=0, le=1_000_000, description="Restarts after a fault before the job fails.")
    window_seconds: int | None = Field(
        None, ge=1, le=2**31, description="Only restarts of the last so many seconds count. Omitted: all of them."
    )
    max_disruptions: int = Field(
        1000,
        ge=0,
        le=1_000_000,
        description="Restarts that do not count against maxRestarts, without a new checkpoint between them, before the"
        " job fails.",
    )
    backoff_seconds: int = Field(
        10,
        ge=0,
        le=86_400,
        description="Wait before a restart; doubles with each one more without a new checkpoint between, up to 300 s.",
    )
    avoid_nodes_after: int = Field(
        2,
        ge=1,
        le=100,
        description="A node where that many faults of this job began, evictions by the node itself included, is left to"
        " the last when pods are placed.",
    )
    rules: Annotated[list[RestartRule], Field(max_length=16)] = Field(
        [],
        description="The first rule that a pod of a failed attempt meets decides. After them: exit code 78 fails the"
        " job; a lack of memory counts; DisruptionTarget and exit code 75 do not count; everything else counts.",
    )


class Hang(ApiModel):
    """Clocks start anew with every attempt and phase. Without any sign from the pods nothing is judged."""

    start_seconds: int = Field(
        1800, ge=1, le=2**31, description="From the first sign of the last pod to the first step of the attempt."
    )
    step_seconds: int = Field(
        900,
        ge=1,
        le=2**31,
        description="From one step to the next, a validation between them included; stands still during a save.",
    )
    checkpoint_seconds: int = Field(1800, ge=1, le=2**31, description="From the start of a save to its commit.")
    straggler_factor: DecimalString = Field(
        "3", description="A rank that computes so many times as long as the median rank is called a straggler."
    )
    action: HangAction = Field(
        "Restart",
        description="When a clock runs out. Event: say so. Restart: counts as a fault. Fail: the job fails."
        " For a straggler it is always Event.",
    )


class Deadlines(ApiModel):
    startup_seconds: int | None = Field(
        None,
        ge=1,
        le=2**31,
        description="Seconds in which all pods of an attempt must run; else the job fails. Omitted: none.",
    )
    active_seconds: int | None = Field(
        None,
        ge=1,
        le=2**31,
        description="Seconds from the job's start, or from when it was last resumed, after which it fails."
        " Omitted: none.",
    )
    ttl_seconds_after_finished: int | None = Field(
        None, ge=0, le=2**31, description="Seconds from the job's end after which it is deleted. Omitted: never."
    )


class CleanUp(ApiModel):
    children: Literal["Keep", "Delete"] = Field(
        "Keep",
        description="When the job has ended. Keep: ended pods stay, with their logs. Delete: they are deleted.",
    )


class RestartFrom(ApiModel):
    phase: str = Field(
        min_length=1, max_length=30, description="That phase is trained again from the checkpoint that it started from."
    )
    request: str = Field(
        "1", min_length=1, max_length=64, description="A new value asks again; a value that was served does nothing."
    )

"""Spec of restarts, hang detection, deadlines and cleanup."""

from typing import Annotated, Literal

from pydantic import Field

from pseudoreal_api.base import ATOMIC, ApiModel, DecimalString
from pseudoreal_api.wire.messages import MOST_IN_PLACE

RuleAction = Literal["Restart", "RestartIgnoringLimit", "Fail"]
HangAction = Literal["Report", "Restart", "Fail"]

_Names = Annotated[list[Annotated[str, Field(min_length=1, max_length=128)]], Field(max_length=16)]


class RestartRule(ApiModel):
    """A rule on failed executions. Exactly one of its three lists has entries."""

    on_exit_codes: Annotated[list[Annotated[int, Field(ge=1, le=255)]], Field(max_length=32)] = Field(
        [],
        description="onExitCodes lists exit codes of the trainer container. 71: out of memory, 75: asked to stop,"
        " 78: invalid job.",
        json_schema_extra=ATOMIC,
    )
    on_pod_conditions: _Names = Field(
        [],
        description="onPodConditions lists types of pod conditions, such as DisruptionTarget; one of them must be"
        " True.",
        json_schema_extra=ATOMIC,
    )
    on_reasons: _Names = Field(
        [],
        description="onReasons lists reasons for which the container or the pod ended, such as OOMKilled, Evicted"
        " or NodeLost.",
        json_schema_extra=ATOMIC,
    )
    action: RuleAction = Field(
        description="action says what follows. Restart: a restart that counts against maxRestarts."
        " RestartIgnoringLimit: a restart that does not count. Fail: the job fails."
    )


class Restart(ApiModel):
    max_restarts: int = Field(
        3, ge=0, le=1_000_000, description="maxRestarts is the number of restarts after a fault before the job fails."
    )
    window_seconds: int | None = Field(
        None,
        ge=1,
        le=2**31,
        description="windowSeconds is the age in seconds from which on a restart no longer counts against"
        " maxRestarts. Omitted: all restarts count.",
    )
    in_place: int = Field(
        3,
        ge=0,
        le=MOST_IN_PLACE,
        description="inPlace is the number of times that the pods of one execution restart their ranks by themselves"
        " when a process died, before pods are made anew; each time counts against maxRestarts. 0: never. A change"
        " counts from the next execution.",
    )
    max_disruptions: int = Field(
        1000,
        ge=0,
        le=1_000_000,
        description="maxDisruptions is the number of restarts that do not count against maxRestarts, without a"
        " new checkpoint between them, before the job fails.",
    )
    backoff_seconds: int = Field(
        10,
        ge=0,
        le=86_400,
        description="backoffSeconds is the wait before a restart. It doubles with each further restart without a"
        " new checkpoint between them, up to 300 s.",
    )
    avoid_nodes_after: int = Field(
        2,
        ge=1,
        le=100,
        description="avoidNodesAfter is the number of faults of this job, evictions by the node included, that"
        " began on a node before pods are placed on other nodes first. A node that rejects a pod is excluded at once,"
        " for some minutes.",
    )
    rules: Annotated[list[RestartRule], Field(max_length=16)] = Field(
        [],
        description="rules decide what follows a failed execution: the first rule that one of its pods meets. Where"
        " none is met: exit code 78 fails the job; a lack of memory counts as a fault;"
        " DisruptionTarget, exit code 75, and pods that their node rejected or lost do not count; everything else"
        " counts.",
        json_schema_extra=ATOMIC,
    )


class Hang(ApiModel):
    """Time limits on progress. The clocks start again with every execution; without reports from the pods no hang is
    detected."""

    start_seconds: int = Field(
        1800,
        ge=1,
        le=2**31,
        description="startSeconds is the longest time from the first report of the last pod to the first step of"
        " the execution.",
    )
    step_seconds: int = Field(
        900,
        ge=1,
        le=2**31,
        description="stepSeconds is the longest time from one step to the next, with a validation and its samples"
        " between them; the clock stands still during a save.",
    )
    checkpoint_seconds: int = Field(
        1800,
        ge=1,
        le=2**31,
        description="checkpointSeconds is the longest time from the start of a save to its commit.",
    )
    straggler_factor: DecimalString = Field(
        "3",
        description="stragglerFactor is how many times as long as the median rank a rank must compute to be"
        " called a straggler.",
    )
    action: HangAction = Field(
        "Restart",
        description="action says what follows when a clock runs out. Report: an event says so. Restart: it counts"
        " as a fault. Fail: the job fails. For a straggler it is always Report.",
    )


class Deadlines(ApiModel):
    startup_seconds: int = Field(
        3600,
        ge=1,
        le=2**31,
        description="startupSeconds is the time in which all pods of an execution must be running; time in a queue does"
        " not count. 2147483648 is as good as no limit.",
    )
    on_startup_timeout: Literal["Restart", "Fail"] = Field(
        "Restart",
        description="onStartupTimeout says what follows when not all pods run in startupSeconds. Restart: those that"
        " do are let go, so that they hold nothing that others wait for, and all are asked for again after a wait that"
        " grows; it does not count against restart.maxRestarts. Fail: the job fails.",
    )
    active_seconds: int | None = Field(
        None,
        ge=1,
        le=2**31,
        description="activeSeconds is the time from the job's start, or from when it was last resumed, after"
        " which the job fails. Omitted: there is no limit.",
    )
    ttl_seconds_after_finished: int | None = Field(
        None,
        ge=0,
        le=2**31,
        description="ttlSecondsAfterFinished is the time from the job's end after which it is deleted. Omitted:"
        " it is never deleted.",
    )


class CleanUp(ApiModel):
    children: Literal["Keep", "Delete"] = Field(
        "Keep",
        description="children says what happens to the pods of a job that has ended. Keep: they stay, with their"
        " logs. Delete: they are deleted.",
    )

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
        description="onExitCodes lists exit codes of the trainer container; the rule applies if one of them"
        " matches. 71: out of memory; 75: asked to stop; 78: invalid job.",
        json_schema_extra=ATOMIC,
    )
    on_pod_conditions: _Names = Field(
        [],
        description="onPodConditions lists types of pod conditions, such as DisruptionTarget; the rule applies if"
        " one of them is True.",
        json_schema_extra=ATOMIC,
    )
    on_reasons: _Names = Field(
        [],
        description="onReasons lists reasons for the end of the container or pod, such as OOMKilled, Evicted or"
        " NodeLost; the rule applies if one of them matches.",
        json_schema_extra=ATOMIC,
    )
    action: RuleAction = Field(
        description="action says what happens if the rule applies. Restart: a restart that counts against"
        " maxRestarts. RestartIgnoringLimit: a restart that does not count. Fail: the job fails."
    )


class Restart(ApiModel):
    max_restarts: int = Field(
        3,
        ge=0,
        le=1_000_000,
        description="maxRestarts is the maximum number of restarts after faults; one more fault fails the job."
        " Disruptions, such as preemption, do not count.",
    )
    window_seconds: int | None = Field(
        None,
        ge=1,
        le=2**31,
        description="windowSeconds is the age, in seconds, at which a restart stops counting against maxRestarts."
        " Set it for long jobs, so that rare faults do not add up. Omitted: all restarts of the job count.",
    )
    in_place: int = Field(
        3,
        ge=0,
        le=MOST_IN_PLACE,
        description="inPlace is the maximum number of times per execution that ranks restart inside their existing"
        " pods after a process died; after that, pods are created again. Each time counts against maxRestarts. 0:"
        " never. A change takes effect with the next execution.",
    )
    max_disruptions: int = Field(
        1000,
        ge=0,
        le=1_000_000,
        description="maxDisruptions is the maximum number of consecutive restarts that do not count against"
        " maxRestarts, without a new checkpoint between them; one more fails the job. It ends a job that is"
        " preempted again and again before it can save.",
    )
    backoff_seconds: int = Field(
        10,
        ge=0,
        le=86_400,
        description="backoffSeconds is the wait, in seconds, before a restart. It doubles with each consecutive"
        " restart without a new checkpoint, up to 300 s.",
    )
    avoid_nodes_after: int = Field(
        2,
        ge=1,
        le=100,
        description="avoidNodesAfter is the number of this job's faults (evictions by the node included) that must"
        " have begun on a node before its pods prefer other nodes. A node that rejects a pod is excluded at once,"
        " for some minutes.",
    )
    rules: Annotated[list[RestartRule], Field(max_length=16)] = Field(
        [],
        description="rules decide what happens after a failed execution: the first rule that applies to one of its"
        " pods. If no rule applies: exit code 78 fails the job; out of memory counts as a fault; DisruptionTarget,"
        " exit code 75, and pods that their node rejected or lost are disruptions, which do not count; everything"
        " else counts as a fault.",
        json_schema_extra=ATOMIC,
    )


class Hang(ApiModel):
    """Time limits on progress. The clocks start again with every execution; without reports from the pods no hang is
    detected."""

    start_seconds: int = Field(
        1800,
        ge=1,
        le=2**31,
        description="startSeconds is the maximum time, in seconds, from the first report of the execution's last"
        " pod to its first step. Raise it if loading data or a checkpoint takes longer.",
    )
    step_seconds: int = Field(
        900,
        ge=1,
        le=2**31,
        description="stepSeconds is the maximum time, in seconds, between two steps, including a validation and its"
        " samples between them. The clock is stopped during a save. Set it well above the longest step.",
    )
    checkpoint_seconds: int = Field(
        1800,
        ge=1,
        le=2**31,
        description="checkpointSeconds is the maximum time, in seconds, from the start of a save to its commit.",
    )
    straggler_factor: DecimalString = Field(
        "3",
        description="stragglerFactor is the ratio between the compute time of a rank and of the median rank from"
        " which on the rank is reported as a straggler.",
    )
    action: HangAction = Field(
        "Restart",
        description="action says what happens when one of these times is exceeded. Report: only an event. Restart:"
        " a restart, which counts as a fault. Fail: the job fails. A straggler is only reported.",
    )


class Deadlines(ApiModel):
    startup_seconds: int = Field(
        3600,
        ge=1,
        le=2**31,
        description="startupSeconds is the maximum time, in seconds, until all pods of an execution run. Time in a"
        " queue does not count. Use 2147483648 for no limit.",
    )
    on_startup_timeout: Literal["Restart", "Fail"] = Field(
        "Restart",
        description="onStartupTimeout says what happens if not all pods run within startupSeconds. Restart: running"
        " pods are deleted too, so that they do not hold nodes that others wait for, and all pods are created again"
        " after a wait that grows; this does not count against restart.maxRestarts. Fail: the job fails.",
    )
    active_seconds: int | None = Field(
        None,
        ge=1,
        le=2**31,
        description="activeSeconds is the maximum time, in seconds, from the start of the job, or from its last"
        " resume; after it the job fails. Time in a queue does not count. Omitted: no limit.",
    )
    ttl_seconds_after_finished: int | None = Field(
        None,
        ge=0,
        le=2**31,
        description="ttlSecondsAfterFinished is the time, in seconds, from the end of the job until the"
        " PseudoRealJob is deleted. Omitted: it is never deleted.",
    )


class CleanUp(ApiModel):
    children: Literal["Keep", "Delete"] = Field(
        "Keep",
        description="children says what happens to the pods of a job that has ended. Keep: they stay, so that their"
        " logs can be read. Delete: they are deleted.",
    )

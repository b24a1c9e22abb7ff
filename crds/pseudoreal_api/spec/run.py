"""The parts of the spec that say how the job runs on a cluster."""

from typing import Annotated, Any, Literal

from pydantic import Field

from pseudoreal_api.base import ApiModel, Quantity, list_map

RESERVED_ENV = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "NODE_RANK",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "JOB_COMPLETION_INDEX",
)
RESERVED_ENV_PREFIXES = ("PET_", "PSEUDOREAL_", "TORCHELASTIC_")


def is_reserved(variable: str) -> bool:
    """Whether only the operator, or torchrun, sets it."""
    return variable in RESERVED_ENV or variable.startswith(RESERVED_ENV_PREFIXES)


CheckpointMode = Literal["async", "sync"]


OptimizerState = Literal["measured", "copy", "scale", "reset"]


class Delink(ApiModel):
    optimizer_state: OptimizerState = Field(
        "scale",
        description="optimizerState says what the moments of a layer are after delinking, where L layers shared a"
        " block. measured: the first moment divided by L, the second divided by how much larger the"
        " squared gradient of the block was than that of a layer, measured tensor by tensor. copy:"
        " unchanged. scale: the first moment divided by L, the second by L squared. reset: zero.",
    )
    timeout_seconds: int = Field(
        1800,
        ge=1,
        le=2**31,
        description="timeoutSeconds is the longest time from the end of a phase until the next one may start,"
        " restarts included.",
    )
    on_timeout: Literal["Fail", "RollBack"] = Field(
        "Fail",
        description="onTimeout says what follows when timeoutSeconds are over. Fail: the job fails. RollBack: the"
        " earlier phase is trained again from the newest checkpoint before its last one, and the"
        " delink is tried again; this counts as a restart.",
    )
    warmup_steps: int = Field(
        0,
        ge=0,
        le=1_000_000_000,
        description="warmupSteps is the number of steps after a delink in which the learning rate rises from 0 to"
        " the value of its schedule.",
    )
    measured_steps: int = Field(
        20,
        ge=1,
        le=1_000_000,
        description="measuredSteps is the number of steps at the end of a phase in which optimizerState measured"
        " measures gradients. A phase that ends early, by loss or gradientCorrelation, trains that"
        " many steps more.",
    )


class NewClaim(ApiModel):
    """A PersistentVolumeClaim that the operator makes, named after the job."""

    storage: Quantity = Field(description="storage is the size of the claim.")
    storage_class_name: str | None = Field(
        None,
        min_length=1,
        max_length=253,
        description="storageClassName is the storage class of the claim. Omitted: the cluster's default.",
    )
    access_mode: Literal["ReadWriteMany", "ReadWriteOnce"] = Field(
        "ReadWriteMany",
        description="accessMode is the access mode of the claim. ReadWriteOnce is enough where all pods of the"
        " job run on one node.",
    )
    policy: Literal["Retain", "Delete"] = Field(
        "Retain",
        description="policy says what happens to the claim when the job is deleted. Retain: it stays. Delete: it"
        " is deleted too, with all checkpoints.",
    )


class Volume(ApiModel):
    claim_name: str | None = Field(
        None,
        min_length=1,
        max_length=253,
        description="claimName is the name of a PersistentVolumeClaim that all pods of the job can write to.",
    )
    claim: NewClaim | None = Field(
        None,
        description="claim describes a PersistentVolumeClaim that is made for the job; it stands instead of claimName.",
    )


class Checkpoint(ApiModel):
    volume: Volume | None = Field(
        None,
        description="volume is where checkpoints are kept between phases and restarts. Omitted: they are kept in"
        " object storage.",
    )
    path: str = Field(
        "/checkpoints",
        min_length=1,
        max_length=1024,
        description="path is the mount path of the volume; without a volume it is the place in object storage, as"
        " s3://BUCKET/PREFIX. `pseudoreal run` mounts no volume: it uses the work directory instead.",
    )
    continue_from: str | None = Field(
        None,
        max_length=80,
        pattern=r"^[a-z]([-a-z0-9]*[a-z0-9])?-[0-9a-f]{8}$",
        description="continueFrom is the folder of another job below path, as JOB-UID8: each phase goes on from"
        " that job's newest checkpoint of the phase of the same name. It is meant for a job that ended"
        " too early; model and sharing must be the same.",
    )
    every_steps: int = Field(
        500, ge=1, le=1_000_000_000, description="everySteps is the number of training steps between two checkpoints."
    )
    mode: CheckpointMode = Field(
        "async",
        description="mode says whether training waits for a checkpoint. async: training goes on while the state"
        " of the checkpoint's own step is written. sync: training waits.",
    )
    buffer_bytes: Quantity = Field(
        "256Mi",
        description="bufferBytes is the host memory of each rank through which a checkpoint passes on its way to"
        " the volume. Training waits for the volume only while this memory is full.",
    )
    keep_last: int = Field(
        3,
        ge=1,
        le=10_000,
        description="keepLast is the number of newest checkpoints that are kept; those at the ends of phases are"
        " always kept.",
    )
    keep_every: int | None = Field(
        None,
        ge=1,
        le=1_000_000_000,
        description="keepEvery also keeps the checkpoints of steps that it divides. Omitted: it keeps none.",
    )


class EnvVar(ApiModel):
    name: str = Field(
        pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", max_length=256, description="name is the name of the variable."
    )
    value: str = Field(max_length=32_768, description="value is the value of the variable.")


class Pod(ApiModel):
    image: str | None = Field(
        None,
        min_length=1,
        max_length=1024,
        description="image is the trainer image. Omitted: the one that the operator was installed with.",
    )
    env: Annotated[list[EnvVar], Field(max_length=100)] = Field(
        [],
        description="env lists environment variables that are added to the trainer container.",
        json_schema_extra=list_map("name"),
    )
    termination_grace_period_seconds: int = Field(
        120,
        ge=1,
        le=86_400,
        description="terminationGracePeriodSeconds is the time that a pod has to save a checkpoint when it is"
        " asked to stop; after it the pod is killed.",
    )
    template: dict[str, Any] = Field(
        {},
        description="template is laid over every pod, as {metadata, spec}: lists of named entries merge by name,"
        " everything else replaces. The container is called trainer.",
        json_schema_extra={"x-kubernetes-preserve-unknown-fields": True},
    )


class Scheduling(ApiModel):
    queue: str | None = Field(
        None,
        min_length=1,
        max_length=63,
        description="queue is the Kueue queue that the phases' Jobs are submitted to.",
    )
    priority_class_name: str | None = Field(
        None, min_length=1, max_length=253, description="priorityClassName is the priority class of the pods."
    )

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
        description="Moments of a layer after delinking, where L layers shared a block. measured: first moment divided"
        " by L, second by how much larger the squared gradient of the block was than that of a layer, measured tensor"
        " by tensor. copy: as they were. scale: first moment divided by L, second by L squared. reset: zero.",
    )
    timeout_seconds: int = Field(
        1800, ge=1, le=2**31, description="From the end of a phase until the next one may start; restarts included."
    )
    on_timeout: Literal["Fail", "RollBack"] = Field(
        "Fail",
        description="Fail: the job fails. RollBack: the phase before goes on from its newest checkpoint before the one"
        " at its end, makes that one anew, and the delink is tried again; counts as a restart.",
    )
    warmup_steps: int = Field(
        0,
        ge=0,
        le=1_000_000_000,
        description="Steps after a delink in which the learning rate rises from 0 to where its schedule is.",
    )
    measured_steps: int = Field(
        20,
        ge=1,
        le=1_000_000,
        description="measured: that many steps at the end of a phase measure. A phase that ends early, by loss or"
        " gradientCorrelation, makes them then.",
    )


class NewClaim(ApiModel):
    """A PersistentVolumeClaim that the operator makes, named after the job."""

    storage: Quantity = Field(description="Its size.")
    storage_class_name: str | None = Field(
        None, min_length=1, max_length=253, description="Storage class. Omitted: the cluster's default."
    )
    access_mode: Literal["ReadWriteMany", "ReadWriteOnce"] = Field(
        "ReadWriteMany", description="ReadWriteOnce is enough where all pods of the job run on one node."
    )
    policy: Literal["Retain", "Delete"] = Field(
        "Retain",
        description="When the job is deleted. Retain: it stays. Delete: it is deleted too, with all checkpoints.",
    )


class Volume(ApiModel):
    claim_name: str | None = Field(
        None,
        min_length=1,
        max_length=253,
        description="A PersistentVolumeClaim that all pods of the job can write to.",
    )
    claim: NewClaim | None = Field(None, description="Instead of claimName: a claim that is made for the job.")


class Checkpoint(ApiModel):
    volume: Volume | None = Field(
        None, description="Where checkpoints are kept between phases and restarts. Omitted: in object storage."
    )
    path: str = Field(
        "/checkpoints",
        min_length=1,
        max_length=1024,
        description="Mount path of the volume; without a volume, the place in object storage, as s3://BUCKET/PREFIX."
        " `pseudoreal run` mounts no volume: it uses the work directory instead.",
    )
    continue_from: str | None = Field(
        None,
        max_length=80,
        pattern=r"^[a-z]([-a-z0-9]*[a-z0-9])?-[0-9a-f]{8}$",
        description="Folder of another job below path, as JOB-UID8: each phase goes on from that job's newest"
        " checkpoint of the phase of this name. For a job that ended too early; model and sharing must be the same.",
    )
    every_steps: int = Field(500, ge=1, le=1_000_000_000, description="Steps between two checkpoints.")
    mode: CheckpointMode = Field(
        "async",
        description="async: training goes on while a checkpoint is written, with the state of its own step. sync: it"
        " waits.",
    )
    buffer_bytes: Quantity = Field(
        "256Mi",
        description="Host memory of each rank through which a checkpoint passes on its way to the volume. Training"
        " waits for the volume only while this is full.",
    )
    keep_last: int = Field(
        3, ge=1, le=10_000, description="Newest checkpoints kept; those at the ends of phases are always kept."
    )
    keep_every: int | None = Field(
        None,
        ge=1,
        le=1_000_000_000,
        description="Checkpoints of steps that this divides are kept as well. Omitted: none.",
    )


class EnvVar(ApiModel):
    name: str = Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", max_length=256, description="Name of the variable.")
    value: str = Field(max_length=32_768, description="Its value.")


class Pod(ApiModel):
    image: str | None = Field(
        None,
        min_length=1,
        max_length=1024,
        description="Trainer image. Omitted: the one the operator was installed with.",
    )
    env: Annotated[list[EnvVar], Field(max_length=100)] = Field(
        [], description="Added to the trainer container.", json_schema_extra=list_map("name")
    )
    termination_grace_period_seconds: int = Field(
        120,
        ge=1,
        le=86_400,
        description="For the checkpoint that a pod saves when it is asked to stop; then it is killed.",
    )
    template: dict[str, Any] = Field(
        {},
        description="Overlay on every pod, as {metadata, spec}: lists of named entries merge by name, the rest"
        " replaces. The container is called trainer.",
        json_schema_extra={"x-kubernetes-preserve-unknown-fields": True},
    )


class Scheduling(ApiModel):
    queue: str | None = Field(
        None, min_length=1, max_length=63, description="Kueue queue that the phases' Jobs are submitted to."
    )
    priority_class_name: str | None = Field(
        None, min_length=1, max_length=253, description="Priority class of the pods."
    )

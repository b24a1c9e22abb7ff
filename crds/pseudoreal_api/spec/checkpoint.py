"""Where checkpoints are kept, how often they are saved, and which are kept."""

from typing import Any, Literal

from pydantic import Field

from pseudoreal_api.base import ApiModel, Quantity, foreign_object

CheckpointMode = Literal["Async", "Sync"]


class ClaimTemplate(ApiModel):
    """A PersistentVolumeClaim that the operator makes, named after the job."""

    spec: dict[str, Any] = Field(
        {},
        description="spec is the spec of a PersistentVolumeClaim. Where it says nothing of accessModes, they are"
        " ReadWriteMany (ReadWriteOnce if no phase has more than one worker); where it asks for no storage, the claim"
        " asks for twice what the checkpoints that are kept need.",
        json_schema_extra=foreign_object(),
    )


class VolumeStorage(ApiModel):
    claim_name: str | None = Field(
        None,
        min_length=1,
        max_length=253,
        description="claimName is the name of a PersistentVolumeClaim that all pods of the job can write to. Omitted:"
        " a claim is made for the job.",
    )
    claim_template: ClaimTemplate | None = Field(
        None,
        description="claimTemplate describes the claim that is made for the job; it stands there instead of claimName.",
    )
    retention_policy: Literal["Retain", "Delete"] = Field(
        "Retain",
        description="retentionPolicy says what happens to a claim that was made for the job when the job is deleted."
        " Retain: it stays. Delete: it is deleted too, with all checkpoints.",
    )
    mount_path: str = Field(
        "/checkpoints",
        min_length=2,
        max_length=1024,
        pattern="^/.",
        description="mountPath is the folder in the pods where the volume is mounted. `pseudoreal run` mounts none: it"
        " uses the work directory instead.",
    )


class ObjectStorage(ApiModel):
    url: str = Field(
        max_length=1024,
        pattern="^s3://[^/]+",
        description="url is the place of all jobs' folders, as s3://BUCKET/PREFIX.",
    )
    endpoint: str | None = Field(
        None,
        max_length=1024,
        pattern="^https?://",
        description="endpoint is the address of the service, such as http://minio.storage:9000. Omitted: that of AWS,"
        " or what the image and spec.pod.env set.",
    )
    credentials_secret_name: str | None = Field(
        None,
        min_length=1,
        max_length=253,
        description="credentialsSecretName is the name of a Secret whose keys become environment variables of the"
        " trainer, such as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY. Omitted: the pods have their rights"
        " otherwise, for instance by their service account.",
    )


class Storage(ApiModel):
    type: Literal["Volume", "ObjectStorage"] = Field(
        "Volume", description="type says which of the fields below is set. Volume: volume, or none of them."
    )
    volume: VolumeStorage | None = Field(
        None, description="volume keeps checkpoints in files. Omitted with type Volume: a claim is made for the job."
    )
    object_storage: ObjectStorage | None = Field(
        None,
        description="objectStorage keeps checkpoints in a service that speaks S3. Omitted with type Volume.",
    )

    @property
    def mounted(self) -> VolumeStorage | None:
        """The volume; None where checkpoints are in object storage."""
        return (self.volume or VolumeStorage()) if self.type == "Volume" else None


class Checkpoint(ApiModel):
    storage: Storage = Field(
        Storage(), description="storage is where checkpoints are kept between executions and phases."
    )
    continue_from: str | None = Field(
        None,
        max_length=80,
        pattern=r"^[a-z]([-a-z0-9]*[a-z0-9])?-[0-9a-f]{8}$",
        description="continueFrom is the folder of another job in the same storage, as JOB-UID8: each phase goes on"
        " from that job's newest checkpoint of the phase of the same name. It is meant for a job that ended"
        " too early; model and sharing must be the same. Omitted: the job begins with random weights.",
    )
    every_steps: int = Field(
        500, ge=1, le=1_000_000_000, description="everySteps is the number of training steps between two checkpoints."
    )
    mode: CheckpointMode = Field(
        "Async",
        description="mode says whether training waits for a checkpoint. Async: training goes on while the state"
        " of the checkpoint's own step is written. Sync: training waits.",
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

"""Checkpoint storage, frequency and retention, and the initial weights of a job."""

from typing import Annotated, Any, Literal

from pydantic import Field

from pseudoreal_api.base import ATOMIC, ApiModel, Quantity
from pseudoreal_api.spec.kubernetes import CLAIM_SPEC, VOLUME_SOURCE

CheckpointMode = Literal["Async", "Sync"]


class ClaimTemplate(ApiModel):
    """A PersistentVolumeClaim created by the operator, named after the job."""

    spec: dict[str, Any] = Field(
        {},
        description="spec is the spec of a PersistentVolumeClaim. Where it says nothing of accessModes, they are"
        " ReadWriteOnce, with which all pods of an execution run on one node, or ReadWriteMany if a phase has several"
        " workers and the job asks for GPUs or other devices, a gang, a topology or hostNetwork; where it asks for no"
        " storage, the claim asks for twice what the checkpoints that are kept need.",
        json_schema_extra=CLAIM_SPEC,
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
        pattern="^(s3|gs|az)://[^/]+",
        description="url is the place of all jobs' folders: s3://, gs:// or az://BUCKET/PREFIX.",
    )
    endpoint: str | None = Field(
        None,
        max_length=1024,
        pattern="^https?://",
        description="endpoint is the address of the service, such as http://minio.storage:9000, for s3:// alone."
        " Omitted: that of AWS, or what the image and spec.pod.env set.",
    )
    credentials_secret_name: str | None = Field(
        None,
        min_length=1,
        max_length=253,
        description="credentialsSecretName is the name of a Secret. For s3:// it has the keys AWS_ACCESS_KEY_ID and"
        " AWS_SECRET_ACCESS_KEY, and AWS_SESSION_TOKEN and AWS_DEFAULT_REGION where they are needed; for az://"
        " AZURE_STORAGE_ACCOUNT_NAME with _ACCOUNT_KEY or _SAS_TOKEN, or _CONNECTION_STRING; other variables belong in"
        " spec.pod.env. Omitted: the pods have their rights otherwise, for instance by their service account.",
    )

    @property
    def scheme(self) -> str:
        return self.url.partition(":")[0]


class Storage(ApiModel):
    type: Literal["Volume", "ObjectStorage"] = Field(
        "Volume", description="type says which of the fields below is set. Volume: volume, or none of them."
    )
    volume: VolumeStorage | None = Field(
        None, description="volume keeps checkpoints in files. Omitted with type Volume: a claim is made for the job."
    )
    object_storage: ObjectStorage | None = Field(
        None,
        description="objectStorage keeps checkpoints in S3 or what speaks its protocol, or in the object storage of"
        " Google or Azure. Omitted with type Volume.",
    )

    @property
    def mounted(self) -> VolumeStorage | None:
        """The volume; None if checkpoints are in object storage."""
        return (self.volume or VolumeStorage()) if self.type == "Volume" else None


class HuggingFaceWeights(ApiModel):
    """A checkpoint as `save_pretrained` of transformers writes it."""

    path: str = Field(
        min_length=1,
        max_length=4096,
        description="path is the folder of config.json and the safetensors files in the trainer pod, or a URL: s3://,"
        " gs:// or az://, or hf://OWNER/NAME@COMMIT. A relative path means the trainer image's working directory; under"
        " `pseudoreal run` it means the folder of the job file.",
    )
    volume: dict[str, Any] | None = Field(
        None,
        description="volume is a Kubernetes volume source (for instance persistentVolumeClaim) that is mounted"
        " read-only at path in the pods of the first phase; path must then be absolute. Omitted: the folder is on"
        " another volume of the pods, in the image, or in object storage.",
        json_schema_extra=VOLUME_SOURCE,
    )


class BlockOrigins(ApiModel):
    """Source layers of the blocks, in a first phase with sharing or with more layers than the weights."""

    type: Literal["Evenly", "Lower", "Listed", "Average", "Stack", "Interleave"] = Field(
        "Evenly",
        description="type is the rule. Evenly: layers at equal distances, the first and the last one included. Lower:"
        " the first layers. Listed: those in layers. Average: the mean of all layers that share the block; it is meant"
        " for layers with a common ancestor, as neurons of others stand in another order in each. It has no meaning"
        " where each layer has a block of its own: then each begins as itself. Stack, Interleave: for weights with"
        " fewer layers, as in phases[].growth; a shared block begins as its first layer does.",
    )
    layers: Annotated[list[Annotated[int, Field(ge=0, le=9_999)]], Field(max_length=256)] = Field(
        [],
        description="layers are, for each block in turn, the layer that it begins as, counted from 0. Empty with every"
        " type but Listed.",
        json_schema_extra=ATOMIC,
    )


class StartFrom(ApiModel):
    type: Literal["HuggingFace"] = Field(description="type says which of the fields below is set.")
    hugging_face: HuggingFaceWeights | None = Field(
        None, description="huggingFace names a checkpoint of transformers. Omitted with every type but HuggingFace."
    )
    blocks: BlockOrigins = Field(
        BlockOrigins(),
        description="blocks says what the blocks of a first phase begin as whose layers share blocks.",
    )

    @property
    def mounted(self) -> HuggingFaceWeights | None:
        """The weights if they have a volume of their own; else None."""
        found = self.hugging_face
        return None if found is None or found.volume is None else found


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
        " too early; model and sharing must be the same. Omitted: the job begins as startFrom says.",
    )
    start_from: StartFrom | None = Field(
        None,
        description="startFrom names weights that the first phase begins with, at step 0 and with moments of zero."
        " Omitted: it begins with random weights.",
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

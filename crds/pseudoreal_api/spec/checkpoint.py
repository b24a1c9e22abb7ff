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
        description="spec is the spec of a PersistentVolumeClaim; the operator fills omitted fields. Omitted"
        " accessModes: ReadWriteMany if a phase has several workers and the job requests GPUs or other devices, a"
        " gang, a topology or hostNetwork; otherwise ReadWriteOnce, with which all pods of an execution run on one"
        " node. Omitted storage request: twice the size of the checkpoints that are kept.",
        json_schema_extra=CLAIM_SPEC,
    )


class VolumeStorage(ApiModel):
    claim_name: str | None = Field(
        None,
        min_length=1,
        max_length=253,
        description="claimName is the name of an existing PersistentVolumeClaim in the job's namespace; all pods of"
        " the job must be able to write to it. Omitted: the operator creates a claim for the job.",
    )
    claim_template: ClaimTemplate | None = Field(
        None,
        description="claimTemplate describes the claim that the operator creates for the job. Do not set it"
        " together with claimName. Omitted values have defaults.",
    )
    retention_policy: Literal["Retain", "Delete"] = Field(
        "Retain",
        description="retentionPolicy says what happens, when the job is deleted, to a claim that the operator"
        " created for it. Retain: the claim and its checkpoints stay. Delete: the claim is deleted with all"
        " checkpoints.",
    )
    mount_path: str = Field(
        "/checkpoints",
        min_length=2,
        max_length=1024,
        pattern="^/.",
        description="mountPath is the folder in the pods at which the volume is mounted. `pseudoreal run` mounts"
        " nothing: it writes checkpoints to its work directory.",
    )


class ObjectStorage(ApiModel):
    url: str = Field(
        max_length=1024,
        pattern="^(s3|gs|az)://[^/]+",
        description="url is the location under which each job has a folder: s3://BUCKET/PREFIX, gs://BUCKET/PREFIX"
        " or az://BUCKET/PREFIX.",
    )
    endpoint: str | None = Field(
        None,
        max_length=1024,
        pattern="^https?://",
        description="endpoint is the address of a service that speaks the S3 protocol, such as"
        " http://minio.storage:9000. It applies to s3:// only. Omitted: AWS, unless the image or spec.pod.env sets"
        " an endpoint.",
    )
    credentials_secret_name: str | None = Field(
        None,
        min_length=1,
        max_length=253,
        description="credentialsSecretName is the name of a Secret in the job's namespace whose keys become"
        " environment variables of the trainer. s3://: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, and if needed"
        " AWS_SESSION_TOKEN and AWS_DEFAULT_REGION. az://: AZURE_STORAGE_ACCOUNT_NAME with"
        " AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN, or AZURE_STORAGE_CONNECTION_STRING. Set other"
        " variables in spec.pod.env. Omitted: pods get access in another way, for instance by their service"
        " account.",
    )

    @property
    def scheme(self) -> str:
        return self.url.partition(":")[0]


class Storage(ApiModel):
    type: Literal["Volume", "ObjectStorage"] = Field(
        "Volume",
        description="type says where checkpoints are kept, and so which field below is set. Volume: a"
        " PersistentVolumeClaim; volume may be omitted. ObjectStorage: S3, Google or Azure object storage.",
    )
    volume: VolumeStorage | None = Field(
        None,
        description="volume configures the claim for checkpoints, with type Volume. Omitted with type Volume: the"
        " operator creates a claim for the job.",
    )
    object_storage: ObjectStorage | None = Field(
        None,
        description="objectStorage keeps checkpoints in S3, in a service that speaks its protocol, or in the object"
        " storage of Google or Azure. Set it with type ObjectStorage. Omitted with type Volume.",
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
        description="path is the folder, in the trainer pod, that contains config.json and safetensors files; or a"
        " URL: s3://, gs://, az://, or hf://OWNER/NAME@COMMIT. A relative path is relative to the working directory"
        " of the trainer image, or, in `pseudoreal run`, to the folder of the job file.",
    )
    volume: dict[str, Any] | None = Field(
        None,
        description="volume is a Kubernetes volume source (for instance persistentVolumeClaim) that is mounted"
        " read-only at path in the pods of the first phase; path must then be absolute. Omitted: path is in the"
        " image or on another volume of the pods, or is a URL.",
        json_schema_extra=VOLUME_SOURCE,
    )


class BlockOrigins(ApiModel):
    """Source layers of the blocks, in a first phase with sharing or with more layers than the weights."""

    type: Literal["Evenly", "Lower", "Listed", "Average", "Stack", "Interleave"] = Field(
        "Evenly",
        description="type says from which layers of the weights each shared block of the first phase starts."
        " Evenly: from layers at equal distances, first and last included. Lower: from the first layers. Listed:"
        " from the layers of the list layers. Average: from the mean of all layers that share the block; use it"
        " only for layers with a common ancestor, because independently trained layers order their neurons"
        " differently. Stack, Interleave: for weights with fewer layers than the phase, as in phases[].growth; a"
        " shared block starts like its first layer. If layers do not share blocks, each layer starts from itself,"
        " and Evenly, Lower, Listed and Average have no effect.",
    )
    layers: Annotated[list[Annotated[int, Field(ge=0, le=9_999)]], Field(max_length=256)] = Field(
        [],
        description="layers are, for each block in order, the index of the layer from which it starts, counted from"
        " 0. Set it only with type Listed.",
        json_schema_extra=ATOMIC,
    )


class StartFrom(ApiModel):
    type: Literal["HuggingFace"] = Field(
        description="type says of which kind the weights are, and so which of the fields below must be set."
    )
    hugging_face: HuggingFaceWeights | None = Field(
        None,
        description="huggingFace is a checkpoint in the format of Hugging Face transformers. Set it with type"
        " HuggingFace. Omitted with every other type.",
    )
    blocks: BlockOrigins = Field(
        BlockOrigins(),
        description="blocks says from which layers of these weights the blocks start, if layers of the first phase"
        " share blocks.",
    )

    @property
    def mounted(self) -> HuggingFaceWeights | None:
        """The weights if they have a volume of their own; else None."""
        found = self.hugging_face
        return None if found is None or found.volume is None else found


class Checkpoint(ApiModel):
    storage: Storage = Field(
        Storage(), description="storage is the place of the job's checkpoints. All executions and phases use it."
    )
    continue_from: str | None = Field(
        None,
        max_length=80,
        pattern=r"^[a-z]([-a-z0-9]*[a-z0-9])?-[0-9a-f]{8}$",
        description="continueFrom is the folder of another job in the same storage, written JOB-UID8 (the first 8"
        " characters of its uid). Each phase continues from the newest checkpoint of that job's phase with the same"
        " name. Use it to continue a job that ended too early; model and sharing must be the same. Omitted: the job"
        " starts as startFrom says.",
    )
    start_from: StartFrom | None = Field(
        None,
        description="startFrom names weights with which the first phase starts, at step 0 and with zero moments."
        " Omitted: weights are random (model.initialWeights).",
    )
    every_steps: int = Field(
        500,
        ge=1,
        le=1_000_000_000,
        description="everySteps is the number of training steps between two checkpoints. A fault loses at most the"
        " steps since the last one. A checkpoint is also saved at the end of each phase.",
    )
    mode: CheckpointMode = Field(
        "Async",
        description="mode says whether training waits while a checkpoint is written. Async: no; the checkpoint"
        " holds the state of the step at which it started. Sync: yes.",
    )
    buffer_bytes: Quantity = Field(
        "256Mi",
        description="bufferBytes is the size of each rank's buffer in host memory through which a checkpoint is"
        " written. Training waits for the storage only while this buffer is full; raise it if saves slow training"
        " down.",
    )
    keep_last: int = Field(
        3,
        ge=1,
        le=10_000,
        description="keepLast is the number of newest checkpoints that are kept. Checkpoints at the ends of phases"
        " are always kept in addition.",
    )
    keep_every: int | None = Field(
        None,
        ge=1,
        le=1_000_000_000,
        description="keepEvery is a number of steps: checkpoints whose step is a multiple of it are kept, too."
        " Omitted: only keepLast and the ends of phases count.",
    )

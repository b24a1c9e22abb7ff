"""The spec of a PseudoRealJob, as the user writes it."""

from typing import Annotated, Any

from pydantic import ConfigDict, Field

from pseudoreal_api.base import GROUP, ApiModel, list_map
from pseudoreal_api.spec.changes import PHASES_CHANGES
from pseudoreal_api.spec.checkpoint import Checkpoint
from pseudoreal_api.spec.data import Data
from pseudoreal_api.spec.logging import Logging
from pseudoreal_api.spec.model import Model
from pseudoreal_api.spec.network import Network
from pseudoreal_api.spec.optimizer import Optimizer, Precision
from pseudoreal_api.spec.phase import Delink, Phase
from pseudoreal_api.spec.pod import Pod, Scheduling
from pseudoreal_api.spec.recovery import CleanUp, Deadlines, Hang, Restart
from pseudoreal_api.spec.request import Request

MANAGER = f"{GROUP}/operator"
"""Value of spec.managedBy for this project's operator."""
_LABEL = "[a-z0-9]([-a-z0-9]*[a-z0-9])?"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
"""Label by which Kueue's users name the queue of a job of any kind."""
PRIORITY_LABEL = "kueue.x-k8s.io/priority-class"
"""Label by which Kueue's users name the WorkloadPriorityClass of a job of any kind."""
_COPY_LABEL = "kueue.x-k8s.io/multikueue-origin"
"""Label of a copy that MultiKueue made of an object of another cluster."""


class PseudoRealJobSpec(ApiModel):
    """Trains a model in phases; each phase's sharing refines the one before, and its layers are no fewer."""

    model: Model = Field(description="model describes the model that the job trains.")
    data: Data = Field(description="data names the training data, its tokenizer, and how validation is done.")
    optimizer: Optimizer = Field(
        Optimizer(),
        description="optimizer sets the optimizer, the learning-rate schedule, and gradient clipping.",
    )
    precision: Precision = Field(
        Precision(),
        description="precision sets the number formats of the computation. The default is bfloat16 with float32"
        " master weights.",
    )
    phases: Annotated[list[Phase], Field(min_length=1, max_length=16)] = Field(
        description="phases are the parts of the training, in order. Between two phases, layers that no longer"
        " share a block are delinked: each gets its own copy of the weights that it used. Added layers or experts"
        " start as copies of earlier ones. Until the job has ended, phases can be appended, and the last one can be"
        " prolonged.",
        json_schema_extra=list_map("name") | {"x-kubernetes-validations": PHASES_CHANGES},
    )
    delink: Delink = Field(
        Delink(),
        description="delink says how the transition between two phases is made: the moments and weights of new"
        " copies, the time limit, and the warm-up after it.",
    )
    checkpoint: Checkpoint = Field(
        Checkpoint(),
        description="checkpoint says where and how often the training state is saved, how many checkpoints are"
        " kept, and from which weights the job starts.",
    )
    logging: Logging = Field(
        Logging(),
        description="logging sends the metrics of each step to TensorBoard, Weights & Biases or MLflow, in addition"
        " to metrics.jsonl. It can be changed while the job is suspended.",
    )
    pod: Pod = Field(
        Pod(),
        description="pod configures the pods of all phases: image, environment, and any field of a pod template. It"
        " can be changed while the job is suspended.",
    )
    network: Network = Field(
        Network(),
        description="network configures the network between the pods: transport, interfaces, shared memory,"
        " isolation. The default lets NCCL choose.",
    )
    restart: Restart = Field(
        Restart(), description="restart says how often, and how, training restarts after faults and disruptions."
    )
    hang: Hang = Field(
        Hang(),
        description="hang says after which time without progress training counts as hanging, and what happens then.",
    )
    deadlines: Deadlines = Field(
        Deadlines(),
        description="deadlines limit the time for starting pods, for the whole job, and for keeping the object"
        " after the job's end.",
    )
    clean_up: CleanUp = Field(CleanUp(), description="cleanUp says whether pods are deleted when the job has ended.")
    scheduling: Scheduling = Field(
        Scheduling(),
        description="scheduling says how pods get nodes: queue, gang, topology and priority. It can be changed"
        " while the job is suspended.",
    )
    requests: Annotated[list[Request], Field(max_length=100)] = Field(
        [],
        description="requests are one-time commands to the job, such as ending a phase now. They are carried out in"
        " order, and their ids then appear in status.servedRequests. A job that has ended ignores them.",
        json_schema_extra=list_map("id"),
    )
    suspend: bool = Field(
        False,
        description="suspend pauses the job. true: save a checkpoint, delete the pods, and wait. false: run, from"
        " the newest checkpoint if there is one.",
    )
    managed_by: str | None = Field(
        None,
        max_length=63,
        pattern=f"^{_LABEL}(\\.{_LABEL})*/[a-zA-Z0-9]([-_.a-zA-Z0-9]*[a-zA-Z0-9])?$",
        description="managedBy is the name of the controller that runs the job, as in batch/v1. If it is another than"
        f" {MANAGER}, such as kueue.x-k8s.io/multikueue, the operator of this cluster ignores the job."
        f" Omitted: {MANAGER}.",
    )

    @property
    def is_managed_here(self) -> bool:
        """Whether the operator of the job's own cluster manages the job."""
        return self.managed_by in (None, MANAGER)


class JobMetadata(ApiModel):
    """Metadata fields needed by the contract; all others belong to Kubernetes."""

    model_config = ConfigDict(extra="ignore")

    name: str
    namespace: str = "default"
    uid: str = ""
    generation: int = 0
    labels: dict[str, str] = Field({})
    annotations: dict[str, str] = Field({})

    @property
    def queue(self) -> str | None:
        """Queue that a label names; None: no label does, or the job is a copy, whose original has waited in it."""
        return None if _COPY_LABEL in self.labels else self.labels.get(QUEUE_LABEL) or None

    @property
    def queue_priority(self) -> str | None:
        """WorkloadPriorityClass that a label names; None: no label does, or the job is a copy."""
        return None if _COPY_LABEL in self.labels else self.labels.get(PRIORITY_LABEL) or None


class PseudoRealJob(ApiModel):
    """One object as returned by the API server, or as written in a user's file."""

    model_config = ConfigDict(extra="ignore")

    metadata: JobMetadata
    spec: PseudoRealJobSpec

    @classmethod
    def from_object(cls, body: dict[str, Any]) -> "PseudoRealJob":
        return cls.model_validate({"metadata": body["metadata"], "spec": body["spec"]}).with_queue()

    def with_queue(self) -> "PseudoRealJob":
        """Return the job with the queue and the priority of its labels in spec.scheduling, unless the spec names them.
        A priority without a queue means nothing to Kueue."""
        scheduling = self.spec.scheduling
        queue = scheduling.queue or self.metadata.queue
        if queue is None:
            return self
        priority = scheduling.workload_priority_class_name or self.metadata.queue_priority
        named = scheduling.model_copy(update={"queue": queue, "workload_priority_class_name": priority})
        return self.model_copy(update={"spec": self.spec.model_copy(update={"scheduling": named})})

    @property
    def queue_conflict(self) -> str | None:
        """Sentence on a label that names another queue than the spec does; None: there is none."""
        named, labelled = self.spec.scheduling.queue, self.metadata.queue
        if named is None or labelled in (None, named):
            return None
        return f"spec.scheduling.queue is {named}, and the job's label {QUEUE_LABEL} says {labelled}; keep one of them"

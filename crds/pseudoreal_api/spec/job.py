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

    model: Model = Field(description="model describes the model that all phases train.")
    data: Data = Field(description="data names the text that the model learns.")
    optimizer: Optimizer = Field(
        Optimizer(),
        description="optimizer sets the update of weights, its learning-rate schedule, and gradient clipping.",
    )
    precision: Precision = Field(Precision(), description="precision sets the number formats.")
    phases: Annotated[list[Phase], Field(min_length=1, max_length=16)] = Field(
        description="phases are trained in this order. Between two phases the layers that no longer share a block"
        " are delinked: each gets its own copy of the weights that it used. Layers that are added begin as others."
        " Phases may be added, and the last one may be prolonged, until the job has ended.",
        json_schema_extra=list_map("name") | {"x-kubernetes-validations": PHASES_CHANGES},
    )
    delink: Delink = Field(Delink(), description="delink says what happens between two phases.")
    checkpoint: Checkpoint = Field(Checkpoint(), description="checkpoint says where and how often the state is saved.")
    logging: Logging = Field(
        Logging(),
        description="logging says where the figures of each step go. It can be changed while the job is suspended.",
    )
    pod: Pod = Field(
        Pod(), description="pod describes the pods of every phase. It can be changed while the job is suspended."
    )
    network: Network = Field(Network(), description="network describes the network between the pods.")
    restart: Restart = Field(Restart(), description="restart says what happens after a fault.")
    hang: Hang = Field(
        Hang(), description="hang says when training that stands still is noticed, and what happens then."
    )
    deadlines: Deadlines = Field(Deadlines(), description="deadlines are limits on time.")
    clean_up: CleanUp = Field(CleanUp(), description="cleanUp says what is left of a job that has ended.")
    scheduling: Scheduling = Field(
        Scheduling(),
        description="scheduling says how the pods come to nodes: by which queue, in gangs, with which priority. It can"
        " be changed while the job is suspended.",
    )
    requests: Annotated[list[Request], Field(max_length=100)] = Field(
        [],
        description="requests ask for something once. They are served in their order; a job that has ended stays as it"
        " is.",
        json_schema_extra=list_map("id"),
    )
    suspend: bool = Field(
        False,
        description="suspend stops and resumes the job. true: save a checkpoint, free the pods and wait. false:"
        " go on from that checkpoint.",
    )
    managed_by: str | None = Field(
        None,
        max_length=63,
        pattern=f"^{_LABEL}(\\.{_LABEL})*/[a-zA-Z0-9]([-_.a-zA-Z0-9]*[a-zA-Z0-9])?$",
        description=f"managedBy names the controller of the job, as in batch/v1. Any other than {MANAGER}, such as"
        " kueue.x-k8s.io/multikueue, and this cluster's operator leaves the job alone. Omitted: it is"
        f" {MANAGER}.",
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

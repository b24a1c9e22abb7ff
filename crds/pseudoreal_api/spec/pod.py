"""Pods of a job: image, environment and template; and their scheduling: queue, gang and priority."""

from typing import Annotated, Any, Literal

from pydantic import Field

from pseudoreal_api.base import ApiModel, list_map
from pseudoreal_api.spec.kubernetes import POD_TEMPLATE, VALUE_SOURCE


class EnvVar(ApiModel):
    name: str = Field(
        pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", max_length=256, description="name is the name of the environment variable."
    )
    value: str | None = Field(
        None,
        max_length=32_768,
        description="value is the value of the environment variable. Omitted: valueFrom says where the value comes"
        " from.",
    )
    value_from: dict[str, Any] | None = Field(
        None,
        description="valueFrom is the source of the value, as in a container: secretKeyRef, configMapKeyRef,"
        " fieldRef or resourceFieldRef. Omitted: value is the value.",
        json_schema_extra=VALUE_SOURCE,
    )


class Pod(ApiModel):
    image: str | None = Field(
        None,
        min_length=1,
        max_length=1024,
        description="image is the trainer image. Omitted: the image that the operator was installed with.",
    )
    env: Annotated[list[EnvVar], Field(max_length=100)] = Field(
        [],
        description="env lists environment variables that are added to the trainer container. The default adds none.",
        json_schema_extra=list_map("name"),
    )
    termination_grace_period_seconds: int | None = Field(
        None,
        ge=1,
        le=86_400,
        description="terminationGracePeriodSeconds is the time, in seconds, that a pod gets to save a checkpoint"
        " after it was asked to stop; then it is killed. Raise it if saving takes longer. Omitted: 120.",
    )
    template: dict[str, Any] = Field(
        {},
        description="template is a PodTemplateSpec of core/v1 (metadata with labels and annotations, and spec) that"
        " is merged over each pod that the operator builds. Lists of named entries are merged by name; every other"
        " value replaces. The trainer's container is called trainer. The default changes nothing.",
        json_schema_extra=POD_TEMPLATE,
    )


GangPolicy = Literal["None", "Native", "SchedulerPlugins", "Volcano"]


class Gang(ApiModel):
    """Gang scheduling of a phase's pods."""

    policy: GangPolicy = Field(
        "None",
        description="policy says which scheduler places all pods of a phase together or none of them. None: no"
        " gang; each pod is placed by itself, and deadlines.startupSeconds releases pods that wait in vain. Native:"
        " the PodGroup of Kubernetes (scheduling.k8s.io/v1beta1). SchedulerPlugins: the coscheduling plugin of"
        " scheduler-plugins. Volcano: the scheduler volcano.",
    )
    timeout_seconds: int | None = Field(
        None,
        ge=1,
        le=86_400,
        description="timeoutSeconds is the time, with policy SchedulerPlugins, for which pods that were assigned a"
        " node wait for the other pods of the gang; then all give up their nodes. Omitted: the default of that"
        " scheduler.",
    )


_LabelKey = Annotated[
    str,
    Field(
        pattern=r"^([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$",
        max_length=317,
    ),
]


class Topology(ApiModel):
    """Network proximity of nodes: nodes with the same value of a label form a domain."""

    required: _LabelKey | None = Field(
        None,
        description="required is the key of a node label, such as topology.kubernetes.io/zone. All pods of an"
        " execution run on nodes with the same value of this label; if there is no room, they wait. Omitted: set"
        " preferred instead.",
    )
    preferred: _LabelKey | None = Field(
        None,
        description="preferred is the key of a node label. The pods of an execution run on nodes with as few"
        " different values of this label as there is room for. Omitted: set required instead.",
    )

    @property
    def key(self) -> str:
        key = self.required or self.preferred
        assert key is not None, "a CEL rule requires exactly one of required and preferred"
        return key


class Scheduling(ApiModel):
    queue: str | None = Field(
        None,
        min_length=1,
        max_length=63,
        description="queue is the name of the Kueue LocalQueue to which the Jobs of phases are submitted. Their"
        " pods are created when the queue admits them. Omitted: no queue; pods are created at once.",
    )
    queue_delink: bool = Field(
        False,
        description="queueDelink says whether delinks wait in the queue, too. They need no GPU. false: delinks run"
        " at once.",
    )
    workload_priority_class_name: str | None = Field(
        None,
        min_length=1,
        max_length=63,
        description="workloadPriorityClassName is the Kueue WorkloadPriorityClass of the job: it decides which job"
        " of a queue is admitted first and which one is preempted. Omitted: priorityClassName decides.",
    )
    gang: Gang = Field(
        Gang(),
        description="gang says whether the pods of a phase are scheduled all at once. Set it if other jobs compete"
        " for the same nodes and no queue coordinates them.",
    )
    topology: Topology | None = Field(
        None,
        description="topology places the pods of an execution near each other in the network, and numbers ranks by"
        " domain and node. Omitted: pods run anywhere, and ranks are numbered by pod.",
    )
    priority_class_name: str | None = Field(
        None,
        min_length=1,
        max_length=253,
        description="priorityClassName is the PriorityClass of the pods. Omitted: the default of the cluster.",
    )

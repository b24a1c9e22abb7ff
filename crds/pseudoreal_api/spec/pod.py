"""Pods of a job: image, environment and template; and their scheduling: queue, gang and priority."""

from typing import Annotated, Any, Literal

from pydantic import Field

from pseudoreal_api.base import ApiModel, list_map
from pseudoreal_api.spec.kubernetes import POD_TEMPLATE, VALUE_SOURCE


class EnvVar(ApiModel):
    name: str = Field(
        pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", max_length=256, description="name is the name of the variable."
    )
    value: str | None = Field(
        None, max_length=32_768, description="value is the value of the variable, instead of valueFrom."
    )
    value_from: dict[str, Any] | None = Field(
        None,
        description="valueFrom is where the value comes from, as in a container: secretKeyRef, configMapKeyRef,"
        " fieldRef or resourceFieldRef. It stands there instead of value.",
        json_schema_extra=VALUE_SOURCE,
    )


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
    termination_grace_period_seconds: int | None = Field(
        None,
        ge=1,
        le=86_400,
        description="terminationGracePeriodSeconds is the time that a pod has to save a checkpoint when it is"
        " asked to stop; after it the pod is killed. Omitted: 120.",
    )
    template: dict[str, Any] = Field(
        {},
        description="template is laid over every pod. It is a PodTemplateSpec of core/v1: labels and annotations as"
        " metadata, and spec. Lists of named entries merge by name, everything else replaces. The container is called"
        " trainer.",
        json_schema_extra=POD_TEMPLATE,
    )


GangPolicy = Literal["None", "Native", "SchedulerPlugins", "Volcano"]


class Gang(ApiModel):
    """Gang scheduling of a phase's pods."""

    policy: GangPolicy = Field(
        "None",
        description="policy says who gives nodes to all pods of a phase at once, or to none of them. Native:"
        " Kubernetes' own PodGroup (scheduling.k8s.io/v1beta1). SchedulerPlugins: the coscheduling of"
        " scheduler-plugins. Volcano: the scheduler volcano. None: each pod gets a node by itself;"
        " deadlines.startupSeconds lets them go again.",
    )
    timeout_seconds: int | None = Field(
        None,
        ge=1,
        le=86_400,
        description="timeoutSeconds is how long pods that have a node wait for the others before all of them let go of"
        " theirs, with the policy SchedulerPlugins. Omitted: as long as that scheduler is set to.",
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
        description="required is the key of a label of nodes, such as topology.kubernetes.io/zone: all pods of an"
        " execution are on nodes with one value of it, or wait. Omitted: preferred says where they are.",
    )
    preferred: _LabelKey | None = Field(
        None,
        description="preferred is the key of a label of nodes: pods of an execution are on nodes with as few values of"
        " it as there is room for. Omitted: required says where they are.",
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
        description="queue is the Kueue LocalQueue that the phases' Jobs are submitted to; their pods are made when it"
        " admits them. Omitted: they are made at once.",
    )
    queue_delink: bool = Field(
        False,
        description="queueDelink says whether delinks, which need no GPU, wait in the queue as well. false: they are"
        " made at once.",
    )
    workload_priority_class_name: str | None = Field(
        None,
        min_length=1,
        max_length=63,
        description="workloadPriorityClassName is the Kueue WorkloadPriorityClass that says which job of a queue comes"
        " first, and which one makes room. Omitted: priorityClassName says it.",
    )
    gang: Gang = Field(Gang(), description="gang says whether the pods of a phase get nodes all at once.")
    topology: Topology | None = Field(
        None,
        description="topology says that the pods of an execution are near each other, and that ranks are numbered by"
        " domain and node. Omitted: they are where there is room, and numbered as the pods are.",
    )
    priority_class_name: str | None = Field(
        None,
        min_length=1,
        max_length=253,
        description="priorityClassName is the priority class of the pods. Omitted: that of the cluster.",
    )

"""The pods of a job: image, environment, template, queue and priority."""

from typing import Annotated, Any

from pydantic import Field

from pseudoreal_api.base import ApiModel, foreign_object, list_map

_KINDS = ("configMapKeyRef", "fieldRef", "resourceFieldRef", "secretKeyRef")
_VALUE_SOURCE = foreign_object(**{k: f"{k} is a source as in core/v1. Omitted: it is another one." for k in _KINDS})


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
        json_schema_extra=_VALUE_SOURCE,
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
        description="template is laid over every pod, as {metadata, spec}: lists of named entries merge by name,"
        " everything else replaces. The container is called trainer.",
        json_schema_extra=foreign_object(
            metadata="metadata holds labels and annotations of the pods. Omitted: they have the operator's alone."
        ),
    )


class Scheduling(ApiModel):
    queue: str | None = Field(
        None,
        min_length=1,
        max_length=63,
        description="queue is the Kueue queue that the phases' Jobs are submitted to. Omitted: they start at once.",
    )
    priority_class_name: str | None = Field(
        None,
        min_length=1,
        max_length=253,
        description="priorityClassName is the priority class of the pods. Omitted: that of the cluster.",
    )

"""Metrics services for the figures of each step, in addition to metrics.jsonl."""

from typing import Annotated, Literal

from pydantic import Field

from pseudoreal_api.base import ApiModel, list_map


class WeightsAndBiases(ApiModel):
    project: str = Field(min_length=1, max_length=128, description="project is the name of the project.")
    entity: str | None = Field(
        None,
        min_length=1,
        max_length=128,
        description="entity is the user or the team that owns the project. Omitted: the one of the key.",
    )
    mode: Literal["Online", "Offline"] = Field(
        "Online",
        description="mode says where figures go. Online: to the service, with the key that spec.pod.env sets as"
        " WANDB_API_KEY. Offline: into the folder wandb of the work directory, from where `wandb sync` sends them.",
    )


class MLflow(ApiModel):
    url: str = Field(
        min_length=1,
        max_length=1024,
        pattern="^[a-z][a-z0-9+.-]*:",
        description="url is the address of the tracking server, such as http://mlflow.monitoring:5000.",
    )
    experiment: str = Field(
        "pseudoreal",
        min_length=1,
        max_length=256,
        description="experiment is the name of the experiment, which is made if it is not there.",
    )


class Sink(ApiModel):
    type: Literal["TensorBoard", "WeightsAndBiases", "MLflow"] = Field(
        description="type says who takes the figures. TensorBoard: files in the folder tensorboard of the work"
        " directory. WeightsAndBiases, MLflow: a service, described in the field of that name."
    )
    weights_and_biases: WeightsAndBiases | None = Field(
        None, description="weightsAndBiases describes the run at Weights & Biases. Omitted with other types."
    )
    mlflow: MLflow | None = Field(None, description="mlflow describes the run at MLflow. Omitted with other types.")


class Logging(ApiModel):
    sinks: Annotated[list[Sink], Field(max_length=3)] = Field(
        [],
        description="sinks take the figures of each step besides metrics.jsonl. The trainer image needs their packages."
        " One that fails is given up, and training goes on.",
        json_schema_extra=list_map("type"),
    )

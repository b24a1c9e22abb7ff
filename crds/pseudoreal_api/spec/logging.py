"""Metrics services for the figures of each step, in addition to metrics.jsonl."""

from typing import Annotated, Literal

from pydantic import Field

from pseudoreal_api.base import ApiModel, list_map


class WeightsAndBiases(ApiModel):
    project: str = Field(
        min_length=1, max_length=128, description="project is the name of the Weights & Biases project."
    )
    entity: str | None = Field(
        None,
        min_length=1,
        max_length=128,
        description="entity is the user or team that owns the project. Omitted: the default entity of the API key.",
    )
    mode: Literal["Online", "Offline"] = Field(
        "Online",
        description="mode says where metrics go. Online: to the service, with the API key in the variable"
        " WANDB_API_KEY of spec.pod.env. Offline: to the folder wandb of the work directory; `wandb sync` uploads"
        " it later.",
    )


class MLflow(ApiModel):
    url: str = Field(
        min_length=1,
        max_length=1024,
        pattern="^[a-z][a-z0-9+.-]*:",
        description="url is the address of the MLflow tracking server, such as http://mlflow.monitoring:5000.",
    )
    experiment: str = Field(
        "pseudoreal",
        min_length=1,
        max_length=256,
        description="experiment is the name of the MLflow experiment. It is created if it does not exist.",
    )


class Sink(ApiModel):
    type: Literal["TensorBoard", "WeightsAndBiases", "MLflow"] = Field(
        description="type is the service that receives the metrics. TensorBoard: event files in the folder"
        " tensorboard of the work directory. WeightsAndBiases, MLflow: that service, configured in the field of"
        " that name."
    )
    weights_and_biases: WeightsAndBiases | None = Field(
        None,
        description="weightsAndBiases configures the Weights & Biases run. Set it with type WeightsAndBiases."
        " Omitted with other types.",
    )
    mlflow: MLflow | None = Field(
        None, description="mlflow configures the MLflow run. Set it with type MLflow. Omitted with other types."
    )


class Logging(ApiModel):
    sinks: Annotated[list[Sink], Field(max_length=3)] = Field(
        [],
        description="sinks are services that receive the metrics of each step, in addition to metrics.jsonl. The"
        " trainer image must contain their Python packages. If a sink fails, training continues without it. The"
        " default is no sink.",
        json_schema_extra=list_map("type"),
    )

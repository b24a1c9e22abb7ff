"""Opens a job's configured sinks."""

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from pseudoreal_api.resolved.config import PhaseConfig
from pseudoreal_api.spec.logging import Sink as Spec

from pseudoreal_trainer.errors import InvalidJobError
from pseudoreal_trainer.training.sinks import mlflow, tensorboard, weights_and_biases
from pseudoreal_trainer.training.sinks.background import Background
from pseudoreal_trainer.training.sinks.sink import Sink


def check_packages(config: PhaseConfig) -> None:
    """Raise InvalidJobError if the package of a configured sink is not installed."""
    packages = {"TensorBoard": tensorboard, "WeightsAndBiases": weights_and_biases, "MLflow": mlflow}
    for spec in config.logging.sinks:
        package = packages[spec.type].PACKAGE
        if find_spec(package) is None:
            raise InvalidJobError(
                f"spec.logging.sinks: {spec.type} needs the package {package}, which this image does not have; take"
                f" an image that has it (pip install {package}), or remove the sink"
            )


def open_sinks(config: PhaseConfig, first_step: int) -> list[Background]:
    """Open the job's sinks. `first_step` is the first step to be logged."""
    return [Background(spec.type, _maker(spec, config, first_step)) for spec in config.logging.sinks]


def _maker(spec: Spec, config: PhaseConfig, first_step: int) -> Callable[[], Sink]:
    work = Path(config.work_directory)
    if spec.weights_and_biases is not None:
        return partial(weights_and_biases.WeightsAndBiases, spec.weights_and_biases, config.job, work)
    if spec.mlflow is not None:
        return partial(mlflow.MLflow, spec.mlflow, config.job)
    return partial(tensorboard.TensorBoard, work, config.execution, first_step)

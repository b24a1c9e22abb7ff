"""Kubeflow's operators, which the benchmark of the operator runs beside it: the training operator, and the Trainer that
came after it with the JobSet that it builds on."""

from dataclasses import dataclass
from pathlib import Path

from pseudoreal_dev.neighbours.building import Neighbour, built

_TRAINING_OPERATOR = Neighbour(
    tool="training-operator",
    program="training-operator",
    module="github.com/kubeflow/training-operator",
    package="github.com/kubeflow/training-operator/cmd/training-operator.v1",
    files={
        "training-operator-definitions": "manifests/base/crds",
        "training-operator-webhooks.yaml": "manifests/base/webhook/manifests.yaml",
    },
)
_TRAINER = Neighbour(
    tool="trainer",
    program="trainer",
    module="github.com/kubeflow/trainer/v2",
    package="github.com/kubeflow/trainer/v2/cmd/trainer-controller-manager",
    files={
        "trainer-definitions": "manifests/base/crds",
        "trainer-webhooks.yaml": "manifests/base/webhook/manifests.yaml",
        "trainer-runtime.yaml": "manifests/base/runtimes/torch_distributed.yaml",
    },
)
_JOBSET = Neighbour(
    tool="trainer",
    program="jobset",
    module="sigs.k8s.io/jobset",
    package="sigs.k8s.io/jobset",
    files={
        "jobset-definitions": "config/components/crd/bases",
        "jobset-webhooks.yaml": "config/components/webhook/manifests.yaml",
    },
)


@dataclass(frozen=True)
class Controller:
    """Paths: of the program, of its CustomResourceDefinitions, of a file with its webhooks."""

    program: Path
    definitions: tuple[Path, ...]
    webhooks: Path


def training_operator() -> Controller:
    """The training operator as dev/tools/training-operator pins it; built when the cache lacks it."""
    return _controller(_TRAINING_OPERATOR)


def trainer() -> Controller:
    """The Trainer as dev/tools/trainer pins it; built when the cache lacks it."""
    return _controller(_TRAINER)


def torch_runtime() -> Path:
    """The Trainer's own runtime for PyTorch, which jobs refer to."""
    return built(_TRAINER) / "trainer-runtime.yaml"


def jobset() -> Controller:
    """The JobSet that the Trainer of dev/tools/trainer requires; built when the cache lacks it."""
    return _controller(_JOBSET)


def _controller(neighbour: Neighbour) -> Controller:
    folder, name = built(neighbour), neighbour.program
    # What kustomize would make of them lies beside them.
    definitions = sorted((folder / f"{name}-definitions").glob("*_*.yaml"))
    return Controller(folder / name, tuple(definitions), folder / f"{name}-webhooks.yaml")

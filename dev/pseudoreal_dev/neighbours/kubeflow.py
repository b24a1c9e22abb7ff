"""Kubeflow's operators, for the benchmark beside the operator: the training operator, its successor Trainer, and the
JobSet controller required by Trainer."""

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
        "trainer-configuration.yaml": "manifests/base/manager/controller_manager_config.yaml",
        "trainer-runtime.yaml": "manifests/base/runtimes/torch_distributed.yaml",
    },
)
_JOBSET = Neighbour(
    tool="jobset",
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
    """Paths of the program, of its CustomResourceDefinitions, and of a file with its webhooks."""

    program: Path
    definitions: tuple[Path, ...]
    webhooks: Path


def training_operator() -> Controller:
    """Return the training operator pinned by dev/tools/training-operator, after building it if needed."""
    return _controller(_TRAINING_OPERATOR)


def trainer() -> Controller:
    """Return the Trainer pinned by dev/tools/trainer, after building it if needed."""
    return _controller(_TRAINER)


def trainer_configuration() -> Path:
    """Return the path of the configuration file in the Trainer's own manifests."""
    return built(_TRAINER) / "trainer-configuration.yaml"


def torch_runtime() -> Path:
    """Return the path of the Trainer's PyTorch runtime. Jobs of the Trainer refer to this runtime."""
    return built(_TRAINER) / "trainer-runtime.yaml"


def jobset() -> Controller:
    """Return the JobSet controller pinned by dev/tools/jobset, after building it if needed. The Trainer creates
    JobSets."""
    return _controller(_JOBSET)


def _controller(neighbour: Neighbour) -> Controller:
    folder, name = built(neighbour), neighbour.program
    # The pattern skips the kustomize files in the same folder.
    definitions = sorted((folder / f"{name}-definitions").glob("*_*.yaml"))
    return Controller(folder / name, tuple(definitions), folder / f"{name}-webhooks.yaml")

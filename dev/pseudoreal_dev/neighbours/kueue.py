"""Kueue, which tests run beside the operator: its controller and what it brings to a cluster, built into the cache."""

from dataclasses import dataclass
from pathlib import Path

from pseudoreal_dev.neighbours.building import Neighbour, built

_KUEUE = Neighbour(
    tool="kueue",
    program="kueue",
    module="sigs.k8s.io/kueue",
    package="sigs.k8s.io/kueue/cmd/kueue",
    files={
        "definitions": "config/components/crd/bases",
        "webhooks.yaml": "config/components/webhook/manifests.yaml",
    },
)


@dataclass(frozen=True)
class Kueue:
    """Paths: of the controller, of a folder with CustomResourceDefinitions, of a file with its webhooks."""

    program: Path
    definitions: Path
    webhooks: Path


def kueue() -> Kueue:
    """Kueue as dev/tools/kueue pins it; built when the cache lacks it."""
    folder = built(_KUEUE)
    return Kueue(folder / _KUEUE.program, folder / "definitions", folder / "webhooks.yaml")

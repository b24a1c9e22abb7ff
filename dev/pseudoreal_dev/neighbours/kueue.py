"""Kueue for tests with the operator: its controller and its cluster-wide objects, built into the cache."""

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
    """Paths of the controller, of a folder with CustomResourceDefinitions, and of a file with its webhooks."""

    program: Path
    definitions: Path
    webhooks: Path


def kueue() -> Kueue:
    """Return Kueue pinned by dev/tools/kueue, after building it if needed."""
    folder = built(_KUEUE)
    return Kueue(folder / _KUEUE.program, folder / "definitions", folder / "webhooks.yaml")

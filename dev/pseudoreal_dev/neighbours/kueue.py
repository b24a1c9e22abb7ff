"""Kueue, which tests run beside the operator: its controller and what it brings to a cluster, built into the cache."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from pseudoreal_dev.machine import go, paths
from pseudoreal_dev.machine.lock import exclusive
from pseudoreal_dev.machine.progress import Cost, progress

_MODULE = paths.TOOLS / "kueue"
_PACKAGE = "sigs.k8s.io/kueue/cmd/kueue"
_DEFINITIONS = "config/components/crd/bases"
_WEBHOOKS = "config/components/webhook/manifests.yaml"


@dataclass(frozen=True)
class Kueue:
    """Paths: of the controller, of a folder with CustomResourceDefinitions, of a file with its webhooks."""

    program: Path
    definitions: Path
    webhooks: Path


def kueue() -> Kueue:
    """Kueue as dev/tools/kueue pins it; built when the cache lacks it."""
    folder = go.folder_of(_MODULE)
    found = Kueue(folder / "kueue", folder / "definitions", folder / "webhooks.yaml")
    with exclusive("binaries"):
        if not found.program.exists():
            folder.mkdir(parents=True, exist_ok=True)
            with progress.step("building Kueue", cost=Cost.FIRST_RUN):
                go.download(_MODULE, [_PACKAGE])
                source = go.source_of(_MODULE, "sigs.k8s.io/kueue")
                shutil.copytree(source / _DEFINITIONS, found.definitions, dirs_exist_ok=True)
                shutil.copyfile(source / _WEBHOOKS, found.webhooks)
                # The program comes last: where it is, all is there.
                go.build(_MODULE, _PACKAGE, found.program)
    return found


def is_cached() -> bool:
    """Whether `kueue` would have nothing to build."""
    return (go.folder_of(_MODULE) / "kueue").exists()

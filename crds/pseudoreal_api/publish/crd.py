"""Generates the CustomResourceDefinition from the models: `python -m pseudoreal_api.publish.crd DIRECTORY`."""

import re
import sys
from pathlib import Path
from typing import Any

import yaml

from pseudoreal_api.base import GROUP, KIND, PLURAL, VERSION
from pseudoreal_api.publish.schema import structural_schema
from pseudoreal_api.spec.job import PseudoRealJobSpec
from pseudoreal_api.status.status import PseudoRealJobStatus

FILE_NAME = f"{GROUP}_{PLURAL}.yaml"
HEADER = "# Generated from crds/pseudoreal_api by `make generate`; do not edit.\n"


def _column(name: str, path: str, kind: str = "string", *, wide: bool = False, description: str) -> dict[str, Any]:
    column: dict[str, Any] = {"name": name, "type": kind, "jsonPath": path, "description": description}
    return column | ({"priority": 1} if wide else {})


PRINTER_COLUMNS = [
    _column("State", ".status.state", description="What the job is doing."),
    _column("Phase", ".status.currentPhase", description="The phase that trains."),
    _column("Step", ".status.progress.step", "integer", description="Steps done, from the job's start."),
    _column("Loss", ".status.progress.loss", description="Training loss, nats per token."),
    _column("Progress", ".status.progress.percent", "integer", description="Percent of all steps."),
    _column("Restarts", ".status.restarts", "integer", description="Restarts after faults."),
    _column("Age", ".metadata.creationTimestamp", "date", description="Time since the job was created."),
    _column("Ready", ".status.replicas.ready", "integer", wide=True, description="Running pods."),
    _column("Val-Loss", ".status.progress.validationLoss", wide=True, description="Validation loss, nats per token."),
    _column("Checkpoint", ".status.checkpoint.latest", wide=True, description="Newest checkpoint."),
    _column("Saved", ".status.checkpoint.savedTime", "date", wide=True, description="Time since it was saved."),
    _column(
        "Reason",
        '.status.conditions[?(@.type=="Failed")].reason',
        wide=True,
        description="Why the job failed, if it did.",
    ),
]


def custom_resource_definition() -> dict[str, Any]:
    schema = {
        "type": "object",
        "description": "A training job whose layers share weights at first and own them later (pseudo-to-real).",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string", "description": "pseudoreal.dev/v1alpha1"},
            "kind": {"type": "string", "description": KIND},
            "metadata": {"type": "object"},
            "spec": structural_schema(PseudoRealJobSpec),
            "status": structural_schema(PseudoRealJobStatus),
        },
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{PLURAL}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": KIND,
                "listKind": f"{KIND}List",
                "plural": PLURAL,
                "singular": KIND.lower(),
                "shortNames": ["prj"],
                "categories": ["all", "training"],
            },
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "subresources": {"status": {}},
                    "additionalPrinterColumns": PRINTER_COLUMNS,
                    "selectableFields": [{"jsonPath": ".status.state"}],
                    "schema": {"openAPIV3Schema": schema},
                }
            ],
        },
    }


class _Dumper(yaml.SafeDumper):
    """YAML writer with quotes around strings such as 3e-4.

    PyYAML reads 3e-4 as a string and so writes it without quotes; Kubernetes would read a number.
    """

    def ignore_aliases(self, _: Any) -> bool:
        """Return True: each type of core/v1 is written in full at each use."""
        return True


_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"^[0-9]+[eE]-?[0-9]+$"), list("0123456789"))


def to_yaml() -> str:
    return HEADER + yaml.dump(custom_resource_definition(), Dumper=_Dumper, sort_keys=False, width=120)


if __name__ == "__main__":
    for directory in map(Path, sys.argv[1:]):
        (directory / FILE_NAME).write_text(to_yaml())

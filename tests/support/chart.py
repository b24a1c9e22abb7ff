"""The Helm chart, rendered by `helm template`."""

import subprocess
from typing import Any

import yaml
from pseudoreal_dev.cluster import binaries
from pseudoreal_dev.machine import paths

Json = dict[str, Any]

CHART = paths.REPOSITORY / "charts" / "pseudoreal"
RELEASE = "pseudoreal"
NAMESPACE = "operators"
WIDE = f"{NAMESPACE}.{RELEASE}"
"""Name of objects outside the release's namespace, or without a namespace."""
KUBE_VERSION = "--kube-version=1.34.4"
IMAGES = tuple(f"--set={part}.image.repository=registry.example/{part}" for part in ("operator", "trainer"))
"""Values without which the chart is refused, as no image is published."""


def helm(*arguments: str) -> str:
    command = [str(binaries.build("helm").path("helm")), *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def render(*values: str) -> list[Json]:
    text = helm("template", RELEASE, str(CHART), f"--namespace={NAMESPACE}", KUBE_VERSION, *IMAGES, *values)
    # The C parser: the other one takes seconds for the CustomResourceDefinition.
    return [document for document in yaml.load_all(text, yaml.CSafeLoader) if document]


def find(documents: list[Json], kind: str, name: str = RELEASE) -> Json:
    return next(d for d in documents if (d["kind"], d["metadata"]["name"]) == (kind, name))

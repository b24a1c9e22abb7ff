"""Checks what is derived from the models: the CustomResourceDefinition, and the chart that carries it."""

import shutil
from pathlib import Path

from pseudoreal_api import crd, reference

from pseudoreal_dev.cluster import binaries
from pseudoreal_dev.demo.chart import CHART
from pseudoreal_dev.machine import paths, shell
from pseudoreal_dev.machine.errors import DevError
from pseudoreal_dev.machine.progress import progress

COPIES = (
    paths.REPOSITORY / "crds" / crd.FILE_NAME,
    CHART / "files" / crd.FILE_NAME,
)
REFERENCE = paths.REPOSITORY / "docs" / "manifest.md"
KUBE_VERSION = "--kube-version=1.34.4"
# The shapes that the chart's templates branch on.
VALUES: tuple[tuple[str, ...], ...] = (
    (),
    ("--set=watchNamespaces={a,b}", "--set=crds.keep=false", "--set=networkPolicy.enabled=true"),
    ("--set=reports.tlsSecret=own", "--set=networkPolicy.enabled=true"),
    ("--set=trainer.ncclConfig=NCCL_IB_HCA=mlx5_0",),
)


def check() -> None:
    """Raises DevError when a generated file is stale."""
    wanted = {**dict.fromkeys(COPIES, crd.to_yaml()), REFERENCE: reference.to_markdown()}
    stale = [path for path, text in wanted.items() if not path.exists() or path.read_text() != text]
    if stale:
        names = ", ".join(str(path.relative_to(paths.REPOSITORY)) for path in stale)
        raise DevError(f"{names} differ from crds/pseudoreal_api; run `make generate` and commit the result")
    progress.note("the generated files are up to date")


def lint_chart() -> None:
    """Raises CommandFailed with Helm's words when the chart is wrong."""
    helm = _helm()
    for values in VALUES:
        shell.output([helm, "lint", "--strict", KUBE_VERSION, CHART, *values])
        shell.output([helm, "template", "pseudoreal", KUBE_VERSION, CHART, *values])
    progress.note("the chart is in order")


def _helm() -> Path | str:
    return shutil.which("helm") or binaries.build(["helm"]).path("helm")

"""Installs the Helm chart from this checkout."""

from collections.abc import Sequence
from pathlib import Path

from pseudoreal_dev.cluster.kubectl import Kubernetes
from pseudoreal_dev.machine import paths, shell
from pseudoreal_dev.machine.errors import DevError
from pseudoreal_dev.machine.progress import progress

CHART = paths.REPOSITORY / "charts" / "pseudoreal"
RELEASE = NAMESPACE = "pseudoreal"


ONE_NODE = ("--set=replicaCount=1",)
"""Chart values for a single machine: a standby replica would only use memory there."""


def install(
    kubernetes: Kubernetes,
    operator_image: str,
    trainer_image: str,
    chart: Path = CHART,
    options: Sequence[str] = ONE_NODE,
) -> None:
    """Install the chart, or upgrade to it, and wait until the operator is ready. `options`: further options of helm."""
    values = [*options, *_image_values("operator", operator_image), *_image_values("trainer", trainer_image)]
    with progress.step("helm install"):
        namespace = [f"--namespace={NAMESPACE}", "--create-namespace"]
        try:
            kubernetes.run_helm(
                "upgrade", "--install", RELEASE, str(chart), *namespace, "--wait", "--timeout=10m", *values
            )
        except shell.CommandFailed as error:
            raise DevError(f"{error}\n{_operator_state(kubernetes)}") from error


def _image_values(part: str, image: str) -> list[str]:
    """Return the chart values for an image with a tag or a digest."""
    name, _, digest = image.partition("@")
    repository, _, tag = name.rpartition(":") if ":" in name.rpartition("/")[2] else (name, "", "")
    version = f"digest={digest}" if digest else f"tag={tag}"
    return [f"--set={part}.image.repository={repository}", f"--set-string={part}.image.{version}"]


def _operator_state(kubernetes: Kubernetes) -> str:
    """Return diagnostics of an operator that does not become ready."""
    shown = []
    for command in (("get", "pods"), ("describe", "pods"), ("logs", f"deployment/{RELEASE}", "--tail=20")):
        try:
            text = kubernetes.run(*command, f"--namespace={NAMESPACE}")
        except shell.CommandFailed as error:
            text = str(error)
        shown.append(f"$ kubectl -n {NAMESPACE} {' '.join(command)}\n{text}")
    return "\n".join(shown)

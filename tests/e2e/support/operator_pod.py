"""The operator on the cluster."""

from typing import Any

from pseudoreal_dev.cluster.kubectl import Kubernetes
from pseudoreal_dev.demo import chart
from pseudoreal_dev.images import images

from tests.e2e.support.job import wait_for

PROGRAM = "-m pseudoreal_operator"
_PODS = (f"--namespace={chart.NAMESPACE}", "--selector=app.kubernetes.io/component=operator")


def install(kubernetes: Kubernetes, *options: str) -> None:
    """Install the chart of this checkout, or upgrade to it."""
    operator, trainer = (images.build(target).name for target in images.Target)
    chart.install(kubernetes, operator, trainer, options=(*chart.ONE_NODE, *options))


def ready_operator(kubernetes: Kubernetes) -> dict[str, Any]:
    """Wait for a ready operator pod, and return it."""

    def found() -> dict[str, Any] | None:
        return next(filter(_is_ready, kubernetes.items("pods", *_PODS)), None)

    return wait_for("a ready operator", found)


def starts(pod: dict[str, Any]) -> int:
    """Return the number of restarts of the operator's container."""
    return int(pod["status"]["containerStatuses"][0]["restartCount"])


def _is_ready(pod: dict[str, Any]) -> bool:
    # An upgrade ends the old pod after the new one is ready.
    if "deletionTimestamp" in pod["metadata"]:
        return False
    conditions = pod["status"].get("conditions", [])
    return any(condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions)

"""Diagnostics of the cluster for a failed test, collected before the cluster is stopped."""

from pseudoreal_api.names import LABEL_JOB
from pseudoreal_dev.cluster.kubectl import Kubernetes
from pseudoreal_dev.demo import chart
from pseudoreal_dev.machine import shell

from tests.e2e.support import operator_log

_OPERATOR = (f"--namespace={chart.NAMESPACE}", f"deployment/{chart.RELEASE}")
_COMMANDS = (
    ("get", "prj,jobs,pods", "--all-namespaces", "--output=wide"),
    ("describe", "prj", "--all-namespaces"),
    ("get", "events", "--all-namespaces", "--sort-by=.metadata.creationTimestamp"),
    ("logs", *_OPERATOR, "--tail=40"),
    ("logs", "--namespace=default", f"--selector={LABEL_JOB}", "--prefix", "--tail=15"),
)
_MOST_LINES = 60


def state(kubernetes: Kubernetes) -> str:
    return "\n\n".join([operator_log.shown(kubernetes), *(_shown(kubernetes, command) for command in _COMMANDS)])


def _shown(kubernetes: Kubernetes, command: tuple[str, ...]) -> str:
    try:
        lines = kubernetes.run(*command).splitlines()[-_MOST_LINES:]
    except shell.CommandFailed as error:
        lines = [str(error)]
    return "\n".join([f"$ kubectl {' '.join(command)}", *lines])

"""Follows a demo's job, shows it, and waits for its deletion."""

from pseudoreal_api.names import LABEL_JOB
from pseudoreal_api.status.status import PseudoRealJobStatus

from pseudoreal_dev.cluster.kubectl import Kubernetes
from pseudoreal_dev.demo.follow import follow
from pseudoreal_dev.demo.target import NAMESPACE
from pseudoreal_dev.machine.errors import DevError
from pseudoreal_dev.machine.progress import progress

FOLLOW_SECONDS = 3600.0


def train(kubernetes: Kubernetes, job: str) -> PseudoRealJobStatus:
    """Follow the job to its success and return its status. Raises DevError after printing the job's description."""
    progress.note(f"following {job}; Ctrl-C leaves it running")
    try:
        with progress.step(f"training {job}", shows_itself=True):
            return follow(kubernetes, job, NAMESPACE, FOLLOW_SECONDS)
    except DevError:
        progress.say(kubernetes.run("describe", "prj", job, f"--namespace={NAMESPACE}"))
        raise


def show(kubernetes: Kubernetes, job: str) -> None:
    for command in (("get", "prj", "-o", "wide"), ("describe", "prj", job)):
        progress.say(f"\n$ kubectl {' '.join(command)}\n{kubernetes.run(*command, f'--namespace={NAMESPACE}')}")


def wait_until_gone(kubernetes: Kubernetes, job: str) -> None:
    """Wait until the pods of a deleted job are gone."""
    selector = f"--selector={LABEL_JOB}={job}"
    kubernetes.run("wait", "--for=delete", "pods", selector, f"--namespace={NAMESPACE}", "--timeout=10m")

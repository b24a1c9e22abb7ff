"""Containers that keep running after the trainer has ended, such as an injected proxy. Pure.

For the job, the end of the trainer is the end of the pod. For Kubernetes it is not: the pod holds its node, and its Job
never completes. So the operator ends such pods, once the status has everything that can be read from them.
"""

from collections.abc import Iterator

from pseudoreal_operator.lifecycle.stopping import is_ending_soon
from pseudoreal_operator.observe.stages import Execution, current_stage
from pseudoreal_operator.observe.view import ChildJob, Pod, View, is_kept_by_sidecar
from pseudoreal_operator.status import conditions

_REMEDY = (
    "decline the injection by a label or an annotation in spec.pod.template, or inject it as a native sidecar: an init"
    " container with restartPolicy Always"
)
_NAMED = 3
"""Maximum number of containers that a sentence names."""


def pods_to_release(view: View) -> Iterator[str]:
    """Yield the names of pods that only other containers keep, and from which nothing is left to be read."""
    for pod in (pod for pod in view.observed.every_pod if pod.sidecars):
        is_read = _is_over(view, pod.execution) or pod in view.observed.replaced
        if is_read and not is_ending_soon(pod, view.now):
            yield pod.name


def never_ends(view: View, job: ChildJob) -> bool:
    """Return whether a Job waits for containers that keep running, although the status has its outcome."""
    kept = any(pod.sidecars for pod in view.observed.every_pod if pod.execution == job.execution)
    return kept and _is_over(view, job.execution)


def sentence(view: View) -> str | None:
    """Return a sentence on a container that keeps a pod of the present execution; None if there is none."""
    pod = next((pod for pod in view.pods if is_kept_by_sidecar(pod, view.now)), None)
    return None if pod is None else describe(pod)


def describe(pod: Pod) -> str:
    names = ", ".join(pod.sidecars[:_NAMED])
    return (
        f"The trainer of pod {pod.name} has ended and container {names} runs on, which would keep the pod and its node"
        f" for ever; the operator ends the pod. What to do: {_REMEDY}."
    )


def _is_over(view: View, execution: Execution) -> bool:
    """Return whether the stored status has the outcome of the execution."""
    if not view.status.phases:
        return False
    if conditions.has_ended(view.observed.status) or current_stage(view.status.phases) is None:
        return True
    return execution != view.execution

"""Pods of a job: those whose logs are read, their ranks and their state. Pure."""

from collections.abc import Iterable, Sequence
from typing import Any

from pseudoreal_operator.observe.ranks import ranges_text
from pseudoreal_operator.observe.stages import StageKind
from pseudoreal_operator.observe.view import Pod, PodPhase

from pseudoreal.errors import NotFound
from pseudoreal.observed_job import ObservedJob, one_line

Json = dict[str, Any]


def pods_to_read(job: ObservedJob, bodies: Iterable[Json], rank: int | None, *, previous: bool) -> list[Pod]:
    """Return the pods of the newest execution or, if `previous`, of the execution before the newest. `rank`: return
    only the pod of this rank; None: all pods.

    Raises NotFound if there are no such pods.
    """
    executions = job.executions(bodies)
    found = executions[-2:-1] if previous else executions[-1:]
    if not found:
        what = "an earlier execution" if previous and executions else "any execution"
        raise NotFound(
            f"there are no pods of {what} of {job.name}; pseudoreal describe {job.name} -n {job.namespace} says what"
            " became of it"
        )
    (pods,) = found
    return pods if rank is None else [_of_rank(job, pods, rank)]


def _of_rank(job: ObservedJob, pods: Sequence[Pod], rank: int) -> Pod:
    pod = pod_of_rank(job, pods, rank)
    if pod is None:
        known = ", ".join(ranks_text(ranks_of(job, pod)) for pod in pods)
        raise NotFound(f"there is no pod of rank {rank} of {job.name}; there are those of {known}")
    return pod


def has_started(pod: Pod) -> bool:
    """Return whether the pod's container may have written a log."""
    return pod.phase is not PodPhase.PENDING


def not_started(pod: Pod) -> str:
    return f"pod {pod.name} has not begun: {pod_state(pod)}"


def line_prefix(job: ObservedJob, pod: Pod) -> str:
    """Return the line prefix: phase, execution and ranks."""
    stage = "" if pod.execution.kind is StageKind.TRAIN else "-delink"
    return f"[{pod.execution.phase}{stage} e{pod.execution.number} rank {ranks_text(ranks_of(job, pod))}] "


def ranks_of(job: ObservedJob, pod: Pod) -> range:
    """Return the ranks of a pod (0 for a delink); empty if unknown."""
    first = job.first_rank(pod)
    size = job.ranks_per_pod(pod.execution.phase) if pod.execution.kind is StageKind.TRAIN else 1
    return range(first, first + size) if first is not None else range(0)


def ranks_text(ranks: range) -> str:
    return ranges_text(ranks) or "-"


def pod_of_rank(job: ObservedJob, pods: Sequence[Pod], rank: int) -> Pod | None:
    return next((pod for pod in pods if rank in ranks_of(job, pod)), None)


def pod_state(pod: Pod) -> str:
    """Return one word for the state of a pod, with the reason in brackets if it does not run."""
    if pod.disruption:
        return f"Disrupted ({one_line(pod.disruption)})"
    if pod.phase is PodPhase.FAILED:
        return f"Failed ({_end(pod)})"
    if pod.deletion_deadline and pod.is_alive:
        return "Ending"
    if pod.phase is PodPhase.PENDING and pod.blocker:
        return f"Pending ({one_line(': '.join(filter(None, (pod.blocker.reason, pod.blocker.message))))})"
    return pod.phase.value if pod.ready or pod.phase is not PodPhase.RUNNING else "Starting"


def _end(pod: Pod) -> str:
    end = pod.termination
    if end is None:
        return one_line(pod.complaint) or "nothing is known of its end"
    why = end.message.message if end.message else "" if end.reason == "Error" else end.reason
    return f"exit code {end.exit_code}{': ' if why else ''}{one_line(why)}"

"""Selects the pods for `logs`, and the prefix of their lines. Pure."""

from collections.abc import Iterable, Sequence
from typing import Any

from pseudoreal_operator.observe.stages import StageKind
from pseudoreal_operator.observe.view import Pod, PodPhase
from pseudoreal_trainer.cli.common import CommandError, ExitStatus

from pseudoreal_client.view.observed_job import ObservedJob
from pseudoreal_client.view.ranks import pod_of_rank, pod_state, ranks_of, ranks_text

Json = dict[str, Any]


def pods_to_read(job: ObservedJob, bodies: Iterable[Json], rank: int | None, *, previous: bool) -> list[Pod]:
    """Return the pods of the newest execution or, if `previous`, of the execution before the newest. `rank`: return
    only the pod of this rank; None: all pods.

    Raises CommandError if there are no such pods.
    """
    executions = job.executions(bodies)
    found = executions[-2:-1] if previous else executions[-1:]
    if not found:
        what = "an earlier execution" if previous and executions else "any execution"
        raise CommandError(
            f"there are no pods of {what} of {job.name}; pseudoreal describe {job.name} -n {job.namespace} says what"
            " became of it",
            ExitStatus.NOT_FOUND,
        )
    (pods,) = found
    return pods if rank is None else [_of_rank(job, pods, rank)]


def _of_rank(job: ObservedJob, pods: Sequence[Pod], rank: int) -> Pod:
    pod = pod_of_rank(job, pods, rank)
    if pod is None:
        known = ", ".join(ranks_text(ranks_of(job, pod)) for pod in pods)
        raise CommandError(
            f"there is no pod of rank {rank} of {job.name}; there are those of {known}", ExitStatus.NOT_FOUND
        )
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

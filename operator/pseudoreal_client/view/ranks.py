"""Where each rank is: its pod, the node, and what keeps it from running. Pure."""

from collections.abc import Sequence
from datetime import datetime

from pseudoreal_operator.observe.stages import StageKind
from pseudoreal_operator.observe.view import Pod, PodPhase

from pseudoreal_client.text import NOTHING, age, columns
from pseudoreal_client.view.seen import SeenJob, cleaned

_WELL = "Running"
_HEADS = ("RANKS", "POD", "NODE", "STATE", "SINCE")


def rank_map(job: SeenJob, pods: Sequence[Pod], now: datetime, most: int | None = None) -> list[str]:
    """One line for each pod of an execution, with the ranks in it; nothing when there are none. `most`: of more pods,
    those that do not run are shown, and the first others."""
    if not pods:
        return []
    shown = pods if most is None else sorted(sorted(pods, key=_is_well)[:most], key=lambda pod: pod.index)
    lines = columns([_HEADS, *(_row(job, pod, now) for pod in shown)])
    return lines if len(shown) == len(pods) else [*lines, _left_out([pod for pod in pods if pod not in shown])]


def _is_well(pod: Pod) -> bool:
    return pod_state(pod) == _WELL


def _left_out(pods: Sequence[Pod]) -> str:
    ill = sum(not _is_well(pod) for pod in pods)
    return f"and {len(pods)} more pods, {f'{ill} of which do not run' if ill else 'all of which run'}"


def ranks_of(job: SeenJob, pod: Pod) -> range:
    """The numbers of a pod's ranks; that of a delink is 0."""
    size = job.ranks_per_pod(pod.execution.phase) if pod.execution.kind is StageKind.TRAIN else 1
    return range(pod.index * size, (pod.index + 1) * size)


def ranks_text(ranks: range) -> str:
    return str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}"


def pod_of_rank(job: SeenJob, pods: Sequence[Pod], rank: int) -> Pod | None:
    return next((pod for pod in pods if rank in ranks_of(job, pod)), None)


def _row(job: SeenJob, pod: Pod, now: datetime) -> list[str]:
    since = age(pod.started, now) if pod.started else NOTHING
    return [ranks_text(ranks_of(job, pod)), pod.name, cleaned(pod.node) or NOTHING, pod_state(pod), since]


def pod_state(pod: Pod) -> str:
    """One word for what a pod does, and in brackets why it does not run."""
    if pod.disruption:
        return f"Disrupted ({cleaned(pod.disruption)})"
    if pod.phase is PodPhase.FAILED:
        return f"Failed ({_end(pod)})"
    if pod.leaves_by and pod.is_alive:
        return "Ending"
    if pod.phase is PodPhase.PENDING and pod.obstacle:
        return f"Pending ({cleaned(': '.join(filter(None, (pod.obstacle.reason, pod.obstacle.message))))})"
    return pod.phase.value if pod.ready or pod.phase is not PodPhase.RUNNING else "Starting"


def _end(pod: Pod) -> str:
    end = pod.termination
    if end is None:
        return cleaned(pod.complaint) or "nothing is known of its end"
    why = end.message.message if end.message else "" if end.reason == "Error" else end.reason
    return f"exit code {end.exit_code}{': ' if why else ''}{cleaned(why)}"

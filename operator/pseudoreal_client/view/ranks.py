"""Location of each rank: its pod and node, and the reason if the pod does not run. Pure."""

from collections.abc import Sequence
from datetime import datetime

from pseudoreal.observed_job import ObservedJob, one_line
from pseudoreal.pods import pod_state, ranks_of, ranks_text
from pseudoreal_operator.observe.view import Pod

from pseudoreal_client.text import NOTHING, age, columns

_RUNNING = "Running"
_HEADS = ("RANKS", "POD", "NODE", "STATE", "SINCE")


def rank_map(job: ObservedJob, pods: Sequence[Pod], now: datetime, most: int | None = None) -> list[str]:
    """Return one line per pod of an execution, with the pod's ranks; empty without pods.

    If there are more than `most` pods, only `most` are shown, pods that do not run first; a last line counts the rest.
    """
    if not pods:
        return []
    shown = pods if most is None else sorted(pods, key=_is_running)[:most]
    lines = columns([_HEADS, *(_row(job, pod, now) for pod in sorted(shown, key=lambda pod: _rank_order(job, pod)))])
    return lines if len(shown) == len(pods) else [*lines, _left_out([pod for pod in pods if pod not in shown])]


def _rank_order(job: ObservedJob, pod: Pod) -> tuple[bool, int, int]:
    """Return the sort key: pods in rank order, pods with unknown ranks last."""
    ranks = ranks_of(job, pod)
    return not ranks, ranks.start, pod.index


def _is_running(pod: Pod) -> bool:
    return pod_state(pod) == _RUNNING


def _left_out(pods: Sequence[Pod]) -> str:
    stopped = sum(not _is_running(pod) for pod in pods)
    return f"and {len(pods)} more pods, {f'{stopped} of which do not run' if stopped else 'all of which run'}"


def node_map(job: ObservedJob) -> list[str]:
    """Return one line per node in the newest recorded placement, with the node's ranks; empty before the first
    placement."""
    placement = job.status.placement
    if placement is None:
        return []
    lines = columns([("NODE", "RANKS"), *((one_line(node.node), one_line(node.ranks)) for node in placement.nodes)])
    return [*lines, f"further nodes: {placement.omitted_nodes}"] if placement.omitted_nodes else lines


def _row(job: ObservedJob, pod: Pod, now: datetime) -> list[str]:
    since = age(pod.started, now) if pod.started else NOTHING
    state = f"{pod_state(pod)} (spare)" if job.is_spare(pod) else pod_state(pod)
    return [ranks_text(ranks_of(job, pod)), pod.name, one_line(pod.node) or NOTHING, state, since]

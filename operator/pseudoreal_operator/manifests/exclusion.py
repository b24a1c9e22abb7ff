"""Nodes that an execution must not get, as they have just rejected pods of the job. Pure.

The scheduler does not know why a node rejected a pod, for instance since its GPU plugin is not up after a reboot: the
node looks free, and the next pod goes there again. A preference for other nodes does not help where these are full. So
the next execution excludes the node, and only for a while: it may be the only one. Each further rejection doubles the
time; an execution that waits for a node longer than that is made anew, without the exclusion.
"""

from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Any

from pseudoreal_api.status.status import Fault, PseudoRealJobStatus

from pseudoreal_operator import clock
from pseudoreal_operator.failures.classify import POD_REJECTED
from pseudoreal_operator.observe.view import Pod

Json = dict[str, Any]

EXCLUDED_SECONDS, MOST_EXCLUDED_SECONDS = 60, 960
"""Seconds for which a node is excluded after its first rejection, and at most."""
_DOUBLINGS = 4
_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


def excluded_nodes(status: PseudoRealJobStatus) -> dict[str, datetime]:
    """Return the nodes that the execution of the status must not get, with the time until which that holds. They follow
    from what the status remembers, at the time at which the execution was asked for."""
    if status.execution_time is None:
        return {}
    asked = clock.from_text(status.execution_time)
    return {node: until for node, until in _times(status).items() if until > asked}


def note(status: PseudoRealJobStatus, pod: Pod | None, now: datetime) -> str:
    """Return a sentence on the node of a pod that was rejected; empty for others."""
    until = _times(status).get(pod.node) if pod and pod.node else None
    if pod is None or until is None or until <= now:
        return ""
    return f" Pods of this job do not go to node {pod.node} before {clock.to_text(until)}."


def _times(status: PseudoRealJobStatus) -> dict[str, datetime]:
    """Return until when each node is excluded, or was."""
    rejections: dict[str, list[Fault]] = {}
    for fault in (*status.faults, *status.disruptions):
        if fault.node and fault.reason == POD_REJECTED:
            rejections.setdefault(fault.node, []).append(fault)
    return {node: _until(known) for node, known in rejections.items()}


def _until(rejections: list[Fault]) -> datetime:
    seconds = EXCLUDED_SECONDS << min(_DOUBLINGS, len(rejections) - 1)
    return max(clock.from_text(one.time) for one in rejections) + timedelta(seconds=seconds)


def never_on(spec: Json, nodes: Iterable[str]) -> Json:
    """Return the pod spec with the requirement of other nodes than these, in each of the user's terms: one of them must
    hold, and so must this."""
    # By the node's name: its label of the host name may say something else. A field is compared with one value.
    fields = [{"key": "metadata.name", "operator": "NotIn", "values": [name]} for name in sorted(nodes)]
    if not fields:
        return spec
    affinity = spec.get("affinity") or {}
    of_nodes = affinity.get("nodeAffinity") or {}
    terms = (of_nodes.get(_REQUIRED) or {}).get("nodeSelectorTerms") or [{}]
    required = {
        "nodeSelectorTerms": [term | {"matchFields": [*(term.get("matchFields") or []), *fields]} for term in terms]
    }
    return spec | {"affinity": affinity | {"nodeAffinity": of_nodes | {_REQUIRED: required}}}

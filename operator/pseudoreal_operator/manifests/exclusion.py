"""Nodes that an execution must not use, because they have just rejected pods of the job. Pure.

The scheduler does not know why a node rejected a pod, for instance because its GPU plugin is not up after a reboot: the
node looks free, and the next pod goes there again. A preference for other nodes does not help if these are full. So the
next execution excludes the node, but only for a while, because all other nodes may be unsuitable. Each further
rejection doubles the time. An execution that waits for a node longer than this time is replaced by an execution without
the exclusion.
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
"""Seconds for which a node is excluded: after its first rejection, and maximum."""
_DOUBLINGS = 4
_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


def excluded_nodes(status: PseudoRealJobStatus) -> dict[str, datetime]:
    """Return node -> time until which the node is excluded, for the nodes that the present execution must not use.
    Exclusions that were over when the execution was requested are left out."""
    if status.execution_time is None:
        return {}
    requested = clock.from_text(status.execution_time)
    return {node: until for node, until in _times(status).items() if until > requested}


def exclusion_note(status: PseudoRealJobStatus, pod: Pod | None, now: datetime) -> str:
    """Return a sentence on the node of a pod that was rejected; empty for other pods."""
    until = _times(status).get(pod.node) if pod and pod.node else None
    if pod is None or until is None or until <= now:
        return ""
    return f" Pods of this job do not go to node {pod.node} before {clock.to_text(until)}."


def _times(status: PseudoRealJobStatus) -> dict[str, datetime]:
    """Return node -> time until which the node is, or was, excluded."""
    rejections: dict[str, list[Fault]] = {}
    for fault in (*status.faults, *status.disruptions):
        if fault.node and fault.reason == POD_REJECTED:
            rejections.setdefault(fault.node, []).append(fault)
    return {node: _until(known) for node, known in rejections.items()}


def _until(rejections: list[Fault]) -> datetime:
    seconds = EXCLUDED_SECONDS << min(_DOUBLINGS, len(rejections) - 1)
    return max(clock.from_text(one.time) for one in rejections) + timedelta(seconds=seconds)


def exclude_nodes(spec: Json, nodes: Iterable[str]) -> Json:
    """Return the pod spec with these nodes excluded in each of the user's node selector terms. Only one of the terms
    must hold, so each of them needs the exclusion."""
    # Match the node's name, because its host name label may have another value. A matchFields requirement takes a
    # single value.
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

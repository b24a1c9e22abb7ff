"""Figures of the lives of jobs in an audit log, for every controller. Pure, and the policy of the log."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from typing import Any

from benchmarks.operator.results import Quantiles, quantiles
from tests.support.load.audit import Request

STATUSES = (
    ("pseudoreal.dev", "pseudorealjobs/status"),
    ("kubeflow.org", "pytorchjobs/status"),
    ("trainer.kubeflow.org", "trainjobs/status"),
)
"""Group and resource of the statuses that report the end of a job."""


def policy(users: Collection[str]) -> dict[str, Any]:
    """Return the audit policy: all requests of the controllers, with bodies of job statuses, and ends of pods."""
    statuses = [{"group": group, "resources": [resource]} for group, resource in STATUSES]
    pods = [{"group": "", "resources": ["pods/status"]}]
    rules: list[dict[str, Any]] = [
        {"level": "Request", "users": [*users], "verbs": ["patch", "update"], "resources": statuses},
        {"level": "Metadata", "users": [*users]},
        {"level": "Metadata", "users": ["admin"], "resources": pods},
        {"level": "None"},
    ]
    return {"apiVersion": "audit.k8s.io/v1", "kind": "Policy", "omitStages": ["RequestReceived"], "rules": rules}


def caused(requests: Iterable[Request], users: Collection[str]) -> list[Request]:
    """Return the controllers' requests about a job, without the lists made at a program's start."""
    return [request for request in requests if request.user in users and request.is_caused and request.job]


def per_job(requests: Iterable[Request], jobs: int) -> dict[str, float]:
    """Return requests by verb and resource, per job."""
    kinds = Counter(map(_kind, requests))
    return {kind: round(count / jobs, 2) for kind, count in kinds.most_common()}


def _kind(request: Request) -> str:
    return request.kind + (", dry run" if request.is_trial else ", refused" if request.is_refused else "")


def writes(requests: Iterable[Request]) -> int:
    return sum(request.is_write for request in requests)


def ends(requests: Iterable[Request]) -> dict[str, float]:
    """Return the time at which each job was first reported as succeeded."""
    found: dict[str, float] = {}
    for request in requests:
        if request.finishes:
            found[request.job] = min(request.done, found.get(request.job, request.done))
    return found


def reactions(requests: Iterable[Request], decides: Callable[[str], bool]) -> Quantiles:
    """Return the seconds from the end of a job's last deciding pod until the reported success.

    `decides` tells by a pod's name whether the job's end depends on it.
    """
    found = [*requests]
    last: dict[str, float] = {}
    for request in found:
        if request.ends_pod and decides(request.name):
            last[request.job] = max(request.done, last.get(request.job, 0.0))
    said = ends(found)
    return quantiles(moment - last[job] for job, moment in said.items() if job in last)

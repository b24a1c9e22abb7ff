"""Requests in the API server's audit log, as the API server counted and timed them. Pure except for reading the file.

All times are the API server's own, so delays of this program and of the operator do not affect the measurement.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.support.names import OPERATOR

SIMULATOR_END = "pod-end"
"""Field manager of the requests that end simulated pods: at level Metadata, an audit log has no bodies."""
JOB_CONTROLLER = "system:serviceaccount:kube-system:job-controller"
_JOB = re.compile(r"load-\d{5}")
_WRITES = ("create", "update", "patch", "delete")
_REFUSED = 400
_GOOD_ENDS = ("Complete", "Succeeded")
"""Conditions of success: of a PseudoRealJob and a TrainJob, and of a PyTorchJob."""


def job_name(number: int) -> str:
    return f"load-{number:05}"


@dataclass(frozen=True, slots=True)
class Request:
    """A request; `begun` and `done` are seconds since the epoch at which it arrived and was answered."""

    begun: float
    done: float
    user: str
    verb: str
    resource: str
    """Resource with subresource."""
    job: str
    """Name of the job that the request is about; empty if there is none, or several."""
    ends_pod: bool
    name: str
    is_trial: bool = False
    """True for a dry run, which stores nothing."""
    finishes: bool = False
    """True if the request writes that a job succeeded. Known only if the audit log has bodies."""
    is_refused: bool = False

    @property
    def kind(self) -> str:
        return f"{self.verb} {self.resource}"

    @property
    def is_of_operator(self) -> bool:
        return self.user == OPERATOR

    @property
    def is_for_jobs(self) -> bool:
        """True if the operator made the request because of jobs."""
        return self.is_of_operator and self.is_caused

    @property
    def is_caused(self) -> bool:
        """True if jobs cause such requests; Lease renewals and watches occur without jobs."""
        return self.resource != "leases" and self.verb != "watch"

    @property
    def is_write(self) -> bool:
        """True if the request changed a job or its children. Events do not count."""
        changes = self.verb in _WRITES and not (self.is_trial or self.is_refused)
        return changes and self.is_caused and self.resource != "events"


class AuditLog:
    """Reads the lines appended since the last call."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset, self._requests = path, 0, list[Request]()

    def requests(self) -> list[Request]:
        with self._path.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                # The last line may be incomplete.
                if not line.endswith(b"\n"):
                    break
                self._offset += len(line)
                if request := parse(json.loads(line)):
                    self._requests.append(request)
        return self._requests


def policy() -> dict[str, Any]:
    """Return the audit policy: all requests of the operator, ends of pods, and Job statuses by the Job controller."""
    rules: list[dict[str, Any]] = [
        {"level": "Metadata", "users": [OPERATOR]},
        _noted([{"group": "", "resources": ["pods/status"]}], users=["admin"]),
        _noted([{"group": "batch", "resources": ["jobs/status"]}], users=[JOB_CONTROLLER]),
        {"level": "None"},
    ]
    return {"apiVersion": "audit.k8s.io/v1", "kind": "Policy", "omitStages": ["RequestReceived"], "rules": rules}


def _noted(resources: list[dict[str, Any]], users: list[str]) -> dict[str, Any]:
    return {"level": "Metadata", "users": users, "resources": resources}


def parse(entry: dict[str, Any]) -> Request | None:
    """Return the request of an entry; None if it will be logged again at its end, like a watch, or is about
    no object."""
    if entry["stage"] == "ResponseStarted" or "objectRef" not in entry:
        return None
    what, refused = entry["objectRef"], entry["responseStatus"]["code"] >= _REFUSED
    about = _JOB.search(what.get("name", "")) or _JOB.search(entry["requestURI"])
    return Request(
        begun=_moment(entry["requestReceivedTimestamp"]),
        done=_moment(entry["stageTimestamp"]),
        user=entry["user"]["username"],
        verb=entry["verb"],
        resource="/".join(filter(None, (what["resource"], what.get("subresource")))),
        job=about[0] if about else "",
        ends_pod=f"fieldManager={SIMULATOR_END}" in entry["requestURI"],
        name=what.get("name", ""),
        is_trial="dryRun=All" in entry["requestURI"],
        finishes=not refused and _finishes(entry.get("requestObject") or {}),
        is_refused=refused,
    )


def _finishes(body: dict[str, Any]) -> bool:
    conditions = (body.get("status") or {}).get("conditions") or []
    return any(condition["type"] in _GOOD_ENDS and condition["status"] == "True" for condition in conditions)


def _moment(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def between(requests: Iterable[Request], begin: float, end: float) -> list[Request]:
    return [request for request in requests if begin <= request.done < end]


def per_kind(requests: Iterable[Request], count: int) -> dict[str, float]:
    """Return requests for jobs by verb and resource, per job for `count` jobs."""
    kinds = Counter(request.kind for request in requests if request.is_for_jobs)
    return {kind: round(number / count, 2) for kind, number in kinds.most_common()}


def longest_gap(requests: Iterable[Request], begin: float, end: float) -> float:
    """Return the longest time between two Lease renewals, in seconds."""
    renewals = [r.done for r in requests if r.is_of_operator and r.kind == "patch leases" and begin <= r.done <= end]
    moments = [begin, *sorted(renewals), end]
    return max(later - earlier for earlier, later in pairwise(moments))


@dataclass(frozen=True)
class Reaction:
    """Seconds from the end of an execution's last pod until the operator's answer was stored."""

    seconds: float
    job_controller: float
    """Seconds of the reaction until the Job's status showed the end; until then the operator does not consider the
    execution done."""


def reactions(requests: Iterable[Request]) -> list[Reaction]:
    """Return the reaction to each execution of each job.

    The answer is the first child Job created after the execution's last pod ended; for the last execution, the last
    status, which reports the job's end.
    """
    jobs: dict[str, list[Request]] = {}
    for request in requests:
        if request.job and request.verb in _WRITES:
            jobs.setdefault(request.job, []).append(request)
    return [reaction for own in jobs.values() for reaction in _reactions(sorted(own, key=lambda r: r.done))]


def _reactions(requests: list[Request]) -> Iterable[Reaction]:
    """Yield the operator's reactions in the requests of one job, which are in order of time."""
    made = [r.done for r in requests if r.is_of_operator and r.kind == "create jobs"]
    said = [r.done for r in requests if r.is_of_operator and r.kind == "patch pseudorealjobs/status"]
    told = [r.done for r in requests if r.user == JOB_CONTROLLER and r.kind == "update jobs/status"]
    for end in _last_ends([r for r in requests if r.ends_pod]):
        answer = next((moment for moment in made if moment > end), said[-1] if said else 0.0)
        if answer <= end:
            continue
        heard = max((moment for moment in told if end < moment < answer), default=end)
        yield Reaction(answer - end, heard - end)


def _last_ends(ends: Iterable[Request]) -> Iterable[float]:
    """Return the last end of a pod in each execution. A pod's name consists of its Job's name, an index and five
    letters."""
    last: dict[str, float] = {}
    for end in ends:
        last[end.name.rsplit("-", 2)[0]] = end.done
    return last.values()


def percentile(values: Iterable[float], share: float) -> float:
    """Return the smallest value that at least this share of the values does not exceed; 0 without values."""
    ordered = sorted(values)
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)] if ordered else 0.0

"""The API server's audit log: requests as it counted and timed them. Pure but for reading the file.

All moments are the API server's own, so neither this program nor the operator adds its delays to what is measured.
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
"""Field manager of the requests by which simulated pods end: an audit log of metadata has no bodies."""
JOB_CONTROLLER = "system:serviceaccount:kube-system:job-controller"
_JOB = re.compile(r"load-\d{5}")
_WRITES = ("create", "update", "patch", "delete")
_REFUSED = 400
_GOOD_ENDS = ("Complete", "Succeeded")
"""Conditions of a PseudoRealJob and a TrainJob, and of a PyTorchJob."""


def job_name(number: int) -> str:
    return f"load-{number:05}"


@dataclass(frozen=True, slots=True)
class Request:
    """Moments in seconds since the epoch, when it came in and when it was answered."""

    begun: float
    done: float
    user: str
    verb: str
    resource: str
    """With its subresource."""
    job: str
    """Name of the PseudoRealJob that it is about; empty when it is about none or several."""
    ends_pod: bool
    name: str
    is_trial: bool = False
    """A dry run: nothing is stored."""
    finishes: bool = False
    """Whether it writes that a job has come to a good end. Known where the audit log has bodies."""
    is_refused: bool = False

    @property
    def kind(self) -> str:
        return f"{self.verb} {self.resource}"

    @property
    def is_of_operator(self) -> bool:
        return self.user == OPERATOR

    @property
    def is_for_jobs(self) -> bool:
        """Whether it is the operator's, and jobs cause it."""
        return self.is_of_operator and self.is_caused

    @property
    def is_caused(self) -> bool:
        """Whether jobs cause it: renewals of the Lease and watches are there without any."""
        return self.resource != "leases" and self.verb != "watch"

    @property
    def is_write(self) -> bool:
        """Whether it has changed a job or its children. Events only tell."""
        changes = self.verb in _WRITES and not (self.is_trial or self.is_refused)
        return changes and self.is_caused and self.resource != "events"


class AuditLog:
    """Reads what was appended since the last look."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset, self._requests = path, 0, list[Request]()

    def requests(self) -> list[Request]:
        with self._path.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                # The last line may be half written.
                if not line.endswith(b"\n"):
                    break
                self._offset += len(line)
                if request := parse(json.loads(line)):
                    self._requests.append(request)
        return self._requests


def policy() -> dict[str, Any]:
    """What is noted: all that the operator asks, ends of pods, and what the Job controller says of Jobs."""
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
    """None: one that is noted again when it ends, as watches are, or that is about no object."""
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
    """Requests for jobs by verb and resource, for each of `count` jobs."""
    kinds = Counter(request.kind for request in requests if request.is_for_jobs)
    return {kind: round(number / count, 2) for kind, number in kinds.most_common()}


def longest_gap(requests: Iterable[Request], begin: float, end: float) -> float:
    """Seconds between two renewals of the Lease, at most."""
    renewals = [r.done for r in requests if r.is_of_operator and r.kind == "patch leases" and begin <= r.done <= end]
    moments = [begin, *sorted(renewals), end]
    return max(later - earlier for earlier, later in pairwise(moments))


@dataclass(frozen=True)
class Reaction:
    """Seconds from the end of the last pod of an execution until the operator's answer to it was stored."""

    seconds: float
    job_controller: float
    """Seconds of the reaction until the Job said so too: before that the operator does not take an execution for
    done."""


def reactions(requests: Iterable[Request]) -> list[Reaction]:
    """For each execution of each job: the first child Job that was made after its last pod had ended; after the last
    execution the last status, which says how the job ended."""
    jobs: dict[str, list[Request]] = {}
    for request in requests:
        if request.job and request.verb in _WRITES:
            jobs.setdefault(request.job, []).append(request)
    return [reaction for own in jobs.values() for reaction in _reactions(sorted(own, key=lambda r: r.done))]


def _reactions(requests: list[Request]) -> Iterable[Reaction]:
    """The reactions of the operator to the requests of one job, which are in the order of time."""
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
    """The last end of a pod in each execution: pods are named after their Job, with an index and five letters at the
    end."""
    last: dict[str, float] = {}
    for end in ends:
        last[end.name.rsplit("-", 2)[0]] = end.done
    return last.values()


def percentile(values: Iterable[float], share: float) -> float:
    """The smallest value that at least this share of them does not exceed; 0 when there are none."""
    ordered = sorted(values)
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)] if ordered else 0.0

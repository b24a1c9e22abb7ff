"""What wakes a job: of the watch events of jobs and of their children, those that are news. Pure, but for the queue.

Of a job only a few words are kept, and none of its children: a pass reads what it needs.
"""

from datetime import datetime, timedelta
from typing import Any, NamedTuple, Protocol

from pseudoreal_api.names import ANNOTATION_FINISH_PHASE, LABEL_JOB

from pseudoreal_operator import clock
from pseudoreal_operator.cluster.finalizer import has_finalizer

Json = dict[str, Any]

GATHER_SECONDS = 0.1
"""After which a change of a child is looked at: changes of a Job and of its pods come together."""


class Name(NamedTuple):
    """Where a job is. Another job of that name may come later; a pass reads which one it is."""

    namespace: str
    name: str


class Wish(NamedTuple):
    """What is asked of the operator, and whether it is done; most events of a job are the echo of our own status."""

    generation: int
    finish_phase: str
    deleting: bool
    has_finalizer: bool
    ended: bool
    told: bool
    """It has a status."""


class Queue(Protocol):
    """Of passes over jobs."""

    def add(self, key: Name, after: float = 0.0) -> None: ...

    def add_backlog(self, key: Name) -> None: ...

    def forget(self, key: Name) -> None: ...


class Wakeups:
    """What jobs and their children tell a queue."""

    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        self._wishes: dict[Name, dict[str, Wish]] = {}
        """By uid as well: events of a job that is gone may come after those of its successor."""

    def job_changed(self, change: str | None, body: Json, now: datetime) -> None:
        """`change`: None for one that was there before."""
        name, uid, wish = name_of(body), body["metadata"]["uid"], _wish(body)
        known = self._wishes.get(name, {}).get(uid)
        if change == "DELETED":
            self._drop(name, uid)
            return
        self._wishes.setdefault(name, {})[uid] = wish
        if known is not None and known != wish:
            self._queue.add(name)
        elif known is None and (wait := first_pass(body, now)) is not None:
            self._begin(name, wait, was_there=change is None)

    def _begin(self, name: Name, wait: float, *, was_there: bool) -> None:
        """After a start there may be thousands of those that were there before."""
        if was_there and wait == 0:
            self._queue.add_backlog(name)
        else:
            self._queue.add(name, wait)

    def child_changed(self, change: str, body: Json) -> None:
        """For a job that has ended, only what still lives is news."""
        metadata = body["metadata"]
        name = Name(metadata["namespace"], metadata.get("labels", {}).get(LABEL_JOB, ""))
        wishes = self._wishes.get(name, {}).values()
        if any(not wish.ended for wish in wishes) or (wishes and change != "DELETED" and _lives(body)):
            self._queue.add(name, GATHER_SECONDS)

    def child_changes_missed(self) -> None:
        for name, wishes in self._wishes.items():
            if any(not wish.ended for wish in wishes.values()):
                self._queue.add_backlog(name)

    def _drop(self, name: Name, uid: str) -> None:
        wishes = self._wishes.get(name, {})
        wishes.pop(uid, None)
        if wishes:
            self._queue.add(name)
        else:
            self._wishes.pop(name, None)
            self._queue.forget(name)


def name_of(body: Json) -> Name:
    return Name(body["metadata"]["namespace"], body["metadata"]["name"])


def first_pass(body: Json, now: datetime) -> float | None:
    """Seconds until a job that was not known needs a pass. None: it has ended, and nothing is to be done about it."""
    wish, spec = _wish(body), body.get("spec") or {}
    if wish.has_finalizer or not (wish.ended or wish.deleting):
        return 0.0
    if wish.deleting:
        return None
    if (spec.get("cleanUp") or {}).get("children") == "Delete":
        return 0.0
    lifetime = (spec.get("deadlines") or {}).get("ttlSecondsAfterFinished")
    done = (body.get("status") or {}).get("completionTime")
    if lifetime is None or done is None:
        return None
    return max(0.0, (clock.from_text(done) + timedelta(seconds=lifetime) - now).total_seconds())


def _wish(body: Json) -> Wish:
    metadata, status = body["metadata"], body.get("status") or {}
    return Wish(
        generation=metadata.get("generation", 0),
        finish_phase=(metadata.get("annotations") or {}).get(ANNOTATION_FINISH_PHASE, ""),
        deleting="deletionTimestamp" in metadata,
        has_finalizer=has_finalizer(metadata),
        ended=_holds(status, "Succeeded") or _holds(status, "Failed"),
        told=bool(status),
    )


def _lives(child: Json) -> bool:
    """A pod or a Job that has not ended."""
    status = child.get("status") or {}
    ended = status.get("phase") in ("Succeeded", "Failed") or _holds(status, "Complete") or _holds(status, "Failed")
    return not ended


def _holds(status: Json, condition: str) -> bool:
    return any(c["type"] == condition and c["status"] == "True" for c in status.get("conditions") or [])

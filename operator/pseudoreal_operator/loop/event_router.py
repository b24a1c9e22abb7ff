"""Event router: decides which watch events of jobs and of their children need a reconcile pass.

Most events of a job are the echo of the operator's own status writes; most events of a child are bookkeeping of the Job
controller: pod counts, finalizers. The router keeps a summary of each job, and compares each child with the version in
the memory of the watches.
"""

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from pseudoreal_api.names import LABEL_JOB

from pseudoreal_operator import clock
from pseudoreal_operator.cluster.api import Name
from pseudoreal_operator.loop.initial_list import IdleJob
from pseudoreal_operator.loop.queue import WorkQueue
from pseudoreal_operator.observe.memory import Change, Memory
from pseudoreal_operator.observe.view import ChildJob, JobState, Pod, PodPhase

Json = dict[str, Any]

URGENT_SECONDS, STARTING_SECONDS, ROUTINE_SECONDS = 0.1, 1.0, 3.0
"""Seconds from an event to its pass, so that related events share one pass; chosen, not measured. Urgent: a Job and its
pods change together. Starting: the pods of an execution start one after another. Routine: after an event of an active
Job, or of a pod that is pending or has succeeded, the next event comes soon."""


class JobSummary(NamedTuple):
    """Fields of a job; a change of any field requires a pass."""

    generation: int
    deleting: bool
    ended: bool
    has_status: bool


class EventRouter:
    """Requests a pass for each watch event that changes a job or a child in a field that a pass reads."""

    def __init__(self, queue: WorkQueue[Name], memory: Memory | None = None) -> None:
        self._queue, self._memory = queue, memory or Memory()
        self._summaries: dict[Name, dict[str, JobSummary]] = {}
        """Name -> uid -> summary of the job. A name may have several uids: events of a deleted job may arrive after
        events of its successor."""
        self._changed: set[Name] | None = None
        """Names of jobs that have changed during the initial list; None before and after the initial list."""
        self._idle: dict[Name, IdleJob] = {}

    def begin_initial_list(self) -> None:
        self._changed = set()

    def store_idle_jobs(self, found: Mapping[Name, IdleJob]) -> None:
        """Store the result of the initial list: these jobs need no first pass, unless they have changed since."""
        changed, self._changed = self._changed or set(), None
        self._idle = {name: idle for name, idle in found.items() if name not in changed}

    def take_idle_job(self, name: Name) -> IdleJob | None:
        """Remove and return the idle job, if this is its first pass and the job has not changed since the initial list;
        else None."""
        return self._idle.pop(name, None)

    def invalidate_initial_list(self, name: Name) -> None:
        """Discard the initial list's result for the job: its next pass reads the job itself."""
        self._idle.pop(name, None)
        if self._changed is not None:
            self._changed.add(name)

    def job_changed(self, change: str | None, body: Json, now: datetime) -> None:
        """Process a change of a job. `change`: the event type; None for a job read from a list."""
        name, uid, summary = name_of(body), body["metadata"]["uid"], summary_of(body)
        known = self._summaries.get(name, {}).get(uid)
        if change is not None or self._is_newer(name, body):
            self.invalidate_initial_list(name)
        if change == "DELETED":
            self._forget(name, uid)
            return
        self._summaries.setdefault(name, {})[uid] = summary
        if known is not None and known != summary:
            self._queue.add(name)
        elif known is None and (wait := first_pass_delay(body, now)) is not None:
            self._queue_first_pass(name, wait, was_there=change is None)

    def status_written(self, body: Json) -> None:
        """Store the summary of a job that a pass has just written, so that the watch event of this write causes no
        pass. The write succeeds only at the version that the pass has read, so nothing but the status is newer."""
        known = self._summaries.get(name_of(body), {})
        if (uid := body["metadata"]["uid"]) in known:
            known[uid] = summary_of(body)

    def uids_of(self, name: Name) -> frozenset[str]:
        """Return the uids of the known jobs of that name."""
        return frozenset(self._summaries.get(name, {}))

    def forget_deleted(self, name: Name, uids: frozenset[str]) -> None:
        """Forget the deleted jobs `uids` of this name, even if no watch event reported their deletion."""
        summaries = self._summaries.get(name, {})
        for uid in uids:
            summaries.pop(uid, None)
        if not summaries:
            self._summaries.pop(name, None)

    def queue_missing(self, names: set[Name], known: frozenset[Name]) -> None:
        """Queue a pass over each known job that a list of all jobs lacks. `known`: the jobs known when the list
        began."""
        for name in known - names:
            self.invalidate_initial_list(name)
            self._queue.add_backlog(name)

    def known_names(self) -> frozenset[Name]:
        return frozenset(self._summaries)

    def _queue_first_pass(self, name: Name, wait: float, *, was_there: bool) -> None:
        """Request the first pass over a job. Jobs that were there before go to the backlog: after a start there may
        be thousands of them."""
        if was_there and wait == 0:
            self._queue.add_backlog(name)
        else:
            self._queue.add(name, wait)

    def _is_newer(self, name: Name, body: Json) -> bool:
        idle = self._idle.get(name)
        return idle is not None and idle.version != body["metadata"]["resourceVersion"]

    def child_changed(self, kind: str, change: str, body: Json) -> None:
        """Store a changed child, and queue its job. If the job has ended, only a child that is still alive needs a
        pass."""
        if (delay := delay_of(self._memory.child_changed(kind, change, body))) is None:
            return
        metadata = body["metadata"]
        name = Name(metadata["namespace"], metadata.get("labels", {}).get(LABEL_JOB, ""))
        self.invalidate_initial_list(name)
        summaries = self._summaries.get(name, {}).values()
        if any(not summary.ended for summary in summaries) or (summaries and change != "DELETED" and _is_alive(body)):
            self._queue.add(name, delay)

    def child_changes_missed(self) -> None:
        for name, summaries in self._summaries.items():
            if any(not summary.ended for summary in summaries.values()):
                self.invalidate_initial_list(name)
                self._queue.add_backlog(name)

    def _forget(self, name: Name, uid: str) -> None:
        summaries = self._summaries.get(name, {})
        summaries.pop(uid, None)
        if summaries:
            self._queue.add(name)
        else:
            self._summaries.pop(name, None)
            self._queue.forget(name)


def name_of(body: Json) -> Name:
    return Name(body["metadata"]["namespace"], body["metadata"]["name"])


def first_pass_delay(body: Json, now: datetime) -> float | None:
    """Return the seconds until a newly found job needs a pass; None: the job has ended or is being deleted, and nothing
    is left to do."""
    summary, spec = summary_of(body), body.get("spec") or {}
    if summary.deleting:
        return None
    if not summary.ended:
        return 0.0
    if (spec.get("cleanUp") or {}).get("children") == "Delete":
        return 0.0
    lifetime = (spec.get("deadlines") or {}).get("ttlSecondsAfterFinished")
    done = (body.get("status") or {}).get("completionTime")
    if lifetime is None or done is None:
        return None
    return max(0.0, (clock.from_text(done) + timedelta(seconds=lifetime) - now).total_seconds())


def summary_of(body: Json) -> JobSummary:
    metadata, status = body["metadata"], body.get("status") or {}
    return JobSummary(
        generation=metadata.get("generation", 0),
        deleting="deletionTimestamp" in metadata,
        ended=_has_condition(status, "Complete") or _has_condition(status, "Failed"),
        has_status=bool(status),
    )


def _is_alive(child: Json) -> bool:
    """Return whether the child is a pod or a Job that has not ended."""
    status = child.get("status") or {}
    has_ended = _has_condition(status, "Complete") or _has_condition(status, "Failed")
    return not (has_ended or status.get("phase") in ("Succeeded", "Failed"))


def _has_condition(status: Json, condition: str) -> bool:
    return any(c["type"] == condition and c["status"] == "True" for c in status.get("conditions") or [])


def delay_of(change: Change) -> float | None:
    """Return the seconds to wait before the pass over the child's job; None if the change says nothing new to a
    pass."""
    before, after = change
    if after is None or after.read is None:
        return URGENT_SECONDS
    if before is not None and before.says_the_same(after):
        return None
    return _coalescing_delay(after.read)


def _coalescing_delay(child: Pod | ChildJob) -> float:
    """Return the seconds to wait for further changes of the job."""
    if isinstance(child, ChildJob):
        is_routine = child.state is JobState.ACTIVE and child.outlives_pods and not child.deleting
        return ROUTINE_SECONDS if is_routine and not (child.queued or child.admitted) else URGENT_SECONDS
    if child.deletion_deadline or child.disruption is not None or child.phase is PodPhase.FAILED:
        return URGENT_SECONDS
    return STARTING_SECONDS if child.phase is PodPhase.RUNNING else ROUTINE_SECONDS

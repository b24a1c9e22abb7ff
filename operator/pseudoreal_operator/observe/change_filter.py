"""Change filter: drops watch events that change nothing that a pass reads. Pure.

Most events of a child are bookkeeping of the Job controller: pod counts, finalizers. The filter keeps one hash for each
child. It only decides whether a pass is made: a pass reads every object again, so a stale hash cannot mislead it.
"""

from typing import Any

from pseudoreal_api.names import LABEL_JOB_UID

from pseudoreal_operator.observe.reading import read_job, read_pod
from pseudoreal_operator.observe.view import ChildJob, JobState, Pod, PodPhase

Json = dict[str, Any]

SOON_SECONDS, RUNS_SECONDS, ROUTINE_SECONDS = 0.1, 1.0, 3.0
"""Delays in seconds that let related events share one pass. A Job and its pods change together; the pods of an
execution start one after another; an active Job, or a pod that is pending or has succeeded, is soon followed by the
next event."""


class ChangeFilter:
    """Hashes of the children that exist, by uid."""

    def __init__(self) -> None:
        self._hashes: dict[str, int] = {}

    def delay(self, kind: str, change: str, body: Json) -> float | None:
        """Return the seconds to wait before the pass over the child's job; None if the event changes nothing."""
        uid = body["metadata"]["uid"]
        if change == "DELETED":
            self._hashes.pop(uid, None)
            return SOON_SECONDS
        try:
            child = read_pod(body) if kind == "Pod" else read_job(body)
        except Exception:  # anyone can label a malformed object; the pass over the job reports the error
            self._hashes.pop(uid, None)
            return SOON_SECONDS
        # Label and owners decide whose child it is. Anyone may change them, and `child` does not contain them.
        metadata = body["metadata"]
        current = hash((repr(child), metadata["labels"].get(LABEL_JOB_UID), repr(metadata.get("ownerReferences"))))
        if self._hashes.get(uid) == current:
            return None
        self._hashes[uid] = current
        return _coalescing_delay(child)

    def forget_all(self) -> None:
        self._hashes.clear()


def _coalescing_delay(child: Pod | ChildJob) -> float:
    """Return the seconds to wait for further changes of the job."""
    if isinstance(child, ChildJob):
        is_routine = child.state is JobState.ACTIVE and child.outlives_pods and not child.deleting
        return ROUTINE_SECONDS if is_routine and not (child.queued or child.admitted) else SOON_SECONDS
    if child.deletion_deadline or child.disruption is not None or child.phase is PodPhase.FAILED:
        return SOON_SECONDS
    return RUNS_SECONDS if child.phase is PodPhase.RUNNING else ROUTINE_SECONDS

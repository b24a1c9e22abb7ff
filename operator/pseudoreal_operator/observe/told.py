"""What watches told last of each child, as far as a pass reads it: an event that only repeats it is no news. Pure.

Most events of a child change nothing that is read: the Job controller counts pods, and takes its finalizers off. A
digest is kept of each child, and never decided upon: a pass that is asked for reads all anew.
"""

from typing import Any

from pseudoreal_api.names import LABEL_JOB_UID

from pseudoreal_operator.observe.reading import read_job, read_pod
from pseudoreal_operator.observe.view import ChildJob, JobState, Pod, PodPhase

Json = dict[str, Any]

SOON_SECONDS, RUNS_SECONDS, ROUTINE_SECONDS = 0.1, 1.0, 3.0
"""Seconds until a change is looked at. Changes of a Job and of its pods come together; pods of a job start one after
the other; and a child that is there, or a pod that has ended well, is followed by pods that run or the Job's end."""


class Told:
    """Digests of the children that are there, by their uids."""

    def __init__(self) -> None:
        self._digests: dict[str, int] = {}

    def take(self, kind: str, change: str, body: Json) -> float | None:
        """Takes a change of a child: seconds until its job is to be looked at; None where it is no news."""
        uid = body["metadata"]["uid"]
        if change == "DELETED":
            self._digests.pop(uid, None)
            return SOON_SECONDS
        try:
            child = read_pod(body) if kind == "Pod" else read_job(body)
        except Exception:  # anybody may label anything; the pass over the job tells what is wrong
            self._digests.pop(uid, None)
            return SOON_SECONDS
        # Anybody may change whose it is.
        metadata = body["metadata"]
        digest = hash((repr(child), metadata["labels"].get(LABEL_JOB_UID), repr(metadata.get("ownerReferences"))))
        if self._digests.get(uid) == digest:
            return None
        self._digests[uid] = digest
        return _patience(child)

    def forget_all(self) -> None:
        self._digests.clear()


def _patience(child: Pod | ChildJob) -> float:
    """Seconds for which more changes of the job are waited for."""
    if isinstance(child, ChildJob):
        is_routine = child.state is JobState.ACTIVE and child.outlives_pods and not child.deleting
        return ROUTINE_SECONDS if is_routine and not (child.queued or child.admitted) else SOON_SECONDS
    if child.leaves_by or child.disruption is not None or child.phase is PodPhase.FAILED:
        return SOON_SECONDS
    return RUNS_SECONDS if child.phase is PodPhase.RUNNING else ROUTINE_SECONDS

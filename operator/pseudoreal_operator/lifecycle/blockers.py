"""Blockers: Kubernetes' reasons why pods do not start yet, with remedies. Pure."""

from collections.abc import Sequence

from pseudoreal_operator.lifecycle.claims import (
    claims_that_cannot_bind,
    one_node_sentence,
    unbound_claims,
    volume_elsewhere_sentence,
)
from pseudoreal_operator.observe.view import Blocker, ChildJob, Pods, View

_NOT_BOUND = (
    "unbound immediate persistentvolumeclaims",
    "volumebinding",
    "persistent volumes to bind",
    'persistentvolumeclaim "',
)
"""Phrases, in lower case, of the scheduler's messages about pods that wait for a volume."""
_ELSEWHERE = (
    "persistentvolume's node affinity",
    "volume node affinity conflict",  # before Kubernetes 1.34
)
"""Phrases, in lower case, of its messages about pods whose volume only some nodes can have."""
_TOGETHER = ("pod affinity rules", "readwriteoncepod", *_ELSEWHERE)
"""Phrases, in lower case, of its messages that a volume for one node or one pod may cause; a topology, and an affinity
in the user's template, cause the first one as well."""
_IMAGE = "correct spec.pod.image in a new job, or give the namespace access to the registry"
_CONFIG = "correct spec.pod.template in a new job, or create what it names"
_REMEDIES = {
    "Unschedulable": "free or add the resources that the scheduler misses, or create the claim that it names",
    "SchedulingGated": "wait for the owner of the scheduling gate",
    "ImagePullBackOff": _IMAGE,
    "ErrImagePull": _IMAGE,
    "ErrImageNeverPull": _IMAGE,
    "InvalidImageName": _IMAGE,
    "CreateContainerConfigError": _CONFIG,
    "CreateContainerError": _CONFIG,
}


def find_blocker(view: View) -> Blocker | None:
    """Return the blocker of the present execution's pods, with facts about the claims that they mount; None if there
    is none. A claim that cannot bind is one before the scheduler says so: it may wait ten minutes for a volume."""
    found = describe_blocker(view.pods)
    if found is None:
        stuck = claims_that_cannot_bind(view) if view.unplaced_pods else []
        return Blocker("ClaimPending", f"The pods get no node. {' '.join(stuck)}") if stuck else None
    because = _on_claims(view, found.message.lower())
    return describe_blocker(view.pods, because) if because else found


def _on_claims(view: View, said: str) -> list[str]:
    """Return sentences on the claims behind a message of the scheduler, in lower case."""
    if any(words in said for words in _NOT_BOUND):
        return unbound_claims(view)
    sentence = one_node_sentence(view) if any(words in said for words in _TOGETHER) else None
    if sentence is None and any(words in said for words in _ELSEWHERE):
        sentence = volume_elsewhere_sentence(view)
    return [sentence] if sentence else []


def why_queued(job: ChildJob, queue: str | None) -> str:
    """Return a sentence on a Job that a queue holds. `queue`: name in spec.scheduling.queue; None: the spec names no
    queue."""
    held_by = f"queue {queue}" if queue else "a queue that spec.scheduling.queue does not name"
    return (
        f"Job {job.name} is suspended until {held_by} admits it. To see why it waits: kubectl describe"
        f" workloads.kueue.x-k8s.io -l kueue.x-k8s.io/job-uid={job.uid}. If this finds no Workload, Kueue or the"
        " queue does not exist."
    )


def describe_blocker(pods: Pods, because: Sequence[str] = ()) -> Blocker | None:
    """Return the blocker of the first blocked pod, in a sentence with a remedy; None if no pod is blocked. `because`:
    sentences on the cause, with its own remedy."""
    blocked = [pod for pod in pods.pending if pod.blocker]
    if not blocked:
        return None
    pod, blocker = blocked[0], blocked[0].blocker
    assert blocker is not None, "`blocked` holds only pods with a blocker"
    others = f" and {len(blocked) - 1} more" if len(blocked) > 1 else ""
    said = f": {blocker.message}".rstrip(". ") if blocker.message else ""
    remedy = _REMEDIES.get(blocker.reason, "it may pass by itself")
    what_to_do = " ".join(because) or f"What to do: {remedy} (kubectl describe pod {pod.name})."
    text = f"Pod {pod.name}{others} cannot start: {blocker.reason}{said}. {what_to_do}"
    return Blocker(blocker.reason or "Waiting", text)

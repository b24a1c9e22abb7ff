"""Blockers: Kubernetes' reasons why pods do not start yet, with remedies. Pure."""

from collections.abc import Sequence
from dataclasses import replace

from pseudoreal_operator.manifests.objects import claim_manifest
from pseudoreal_operator.observe.view import Blocker, ChildJob, Pod, PodPhase, View

_MANY = "ReadWriteMany"
_NOT_BOUND = ("unbound immediate persistentvolumeclaims", "volumebinding", "persistent volumes to bind")
"""Phrases, in lower case, of the scheduler's messages about pods that wait for a volume."""
_IMAGE = "correct spec.pod.image in a new job, or give the namespace access to the registry"
_CONFIG = "correct spec.pod.template in a new job, or create what it names"
_REMEDIES = {
    "Unschedulable": "free or add what the scheduler misses, or create the claim that it names",
    "SchedulingGated": "wait for the owner of the scheduling gate",
    "ImagePullBackOff": _IMAGE,
    "ErrImagePull": _IMAGE,
    "ErrImageNeverPull": _IMAGE,
    "InvalidImageName": _IMAGE,
    "CreateContainerConfigError": _CONFIG,
    "CreateContainerError": _CONFIG,
}


def find_blocker(view: View) -> Blocker | None:
    """Return the blocker of the present execution's pods, with facts about the job's claim; None if there is none."""
    found = describe_blocker(view.pods)
    if found is None or not any(words in found.message.lower() for words in _NOT_BOUND):
        return found
    return replace(found, message=f"{found.message}{_on_the_claim(view)}")


def _on_the_claim(view: View) -> str:
    """Return a sentence on the claim created for the job if the claim must be mounted by several nodes; else an empty
    text. The operator cannot check this: it reads no object with the capabilities of a storage class."""
    claim = claim_manifest(view.observed.job)
    if claim is None or _MANY not in claim["spec"].get("accessModes", ()):
        return ""
    name = claim["metadata"]["name"]
    storage = claim["spec"].get("storageClassName") or "the cluster's default"
    return (
        f" Claim {name} asks for {_MANY}, as pods on several nodes write checkpoints, and many storage classes have no"
        f" such volumes; its class is {storage}. If kubectl describe pvc {name} -n {view.metadata.namespace} says so,"
        " make the job anew with spec.checkpoint.storage.volume.claimTemplate.spec.storageClassName of a class that has"
        " them, or with spec.checkpoint.storage.type ObjectStorage."
    )


def why_queued(job: ChildJob, queue: str | None) -> str:
    """Return a sentence on a Job that a queue holds. `queue`: name in spec.scheduling.queue; None: the spec names no
    queue."""
    held_by = f"queue {queue}" if queue else "a queue that spec.scheduling.queue does not name"
    return (
        f"Job {job.name} is suspended until {held_by} admits it. What it waits for:"
        f" kubectl describe workloads.kueue.x-k8s.io -l kueue.x-k8s.io/job-uid={job.uid}."
        " Where there is none, Kueue or that queue is missing."
    )


def describe_blocker(pods: Sequence[Pod]) -> Blocker | None:
    """Return the blocker of the first blocked pod, in a sentence with a remedy; None if no pod is blocked."""
    blocked = [pod for pod in pods if pod.phase is PodPhase.PENDING and pod.blocker]
    if not blocked:
        return None
    pod, blocker = blocked[0], blocked[0].blocker
    assert blocker is not None, "`blocked` holds only pods with a blocker"
    others = f" and {len(blocked) - 1} more" if len(blocked) > 1 else ""
    remedy = _REMEDIES.get(blocker.reason, "it may pass by itself")
    said = f": {blocker.message}".rstrip(". ") if blocker.message else ""
    return Blocker(
        blocker.reason or "Waiting",
        f"Pod {pod.name}{others} cannot start: {blocker.reason}{said}. What to do: {remedy}"
        f" (kubectl describe pod {pod.name}).",
    )

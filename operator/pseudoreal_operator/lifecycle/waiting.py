"""Reasons why the pods of an execution do not all run yet, completed with facts about the job. Pure."""

from dataclasses import replace

from pseudoreal_operator.failures.obstacles import describe_blocker
from pseudoreal_operator.manifests.objects import claim_manifest
from pseudoreal_operator.observe.view import Blocker, View

_MANY = "ReadWriteMany"
_NOT_BOUND = ("unbound immediate persistentvolumeclaims", "volumebinding", "persistent volumes to bind")
"""Phrases, in lower case, of the scheduler's messages about pods that wait for a volume."""


def find_blocker(view: View) -> Blocker | None:
    """Return the obstacle that keeps pods of the present execution from running; None if there is none."""
    found = describe_blocker(view.pods)
    if found is None or not any(words in found.message.lower() for words in _NOT_BOUND):
        return found
    return replace(found, message=f"{found.message}{_on_the_claim(view)}")


def _on_the_claim(view: View) -> str:
    """Return a sentence on the claim created for the job; empty if there is none, or nothing to say about it. No
    object that the operator reads tells the capabilities of the claim's storage class."""
    made = claim_manifest(view.observed.job)
    if made is None or _MANY not in made["spec"].get("accessModes", ()):
        return ""
    name = made["metadata"]["name"]
    storage = made["spec"].get("storageClassName") or "the cluster's default"
    return (
        f" Claim {name} asks for {_MANY}, as pods on several nodes write checkpoints, and many storage classes have no"
        f" such volumes; its class is {storage}. If kubectl describe pvc {name} -n {view.metadata.namespace} says so,"
        " make the job anew with spec.checkpoint.storage.volume.claimTemplate.spec.storageClassName of a class that has"
        " them, or with spec.checkpoint.storage.type ObjectStorage."
    )

"""The PersistentVolumeClaim that is made for a job. Pure."""

from typing import Any

from pseudoreal_api.names import claim_name
from pseudoreal_api.spec.job import PseudoRealJob
from pseudoreal_api.spec.run import NewClaim

from pseudoreal_operator.manifests.objects import job_labels, own_labels, owner

Json = dict[str, Any]


def claim(job: PseudoRealJob) -> Json | None:
    """The claim; None when the job asks for none. A claim that stays when the job is deleted belongs to nobody: it has
    neither an owner nor the uid of the job, and a later job of the same name goes on with it."""
    volume = job.spec.checkpoint.volume
    if volume is None or volume.claim is None:
        return None
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": _metadata(job, volume.claim),
        "spec": _spec(volume.claim),
    }


def _metadata(job: PseudoRealJob, wanted: NewClaim) -> Json:
    metadata: Json = {
        "name": claim_name(job.metadata.name),
        "namespace": job.metadata.namespace,
        "labels": job_labels(job),
    }
    if wanted.policy == "Delete":
        metadata["labels"] = own_labels(job)
        metadata["ownerReferences"] = [owner(job)]
    return metadata


def _spec(wanted: NewClaim) -> Json:
    spec: Json = {
        "accessModes": [wanted.access_mode],
        "resources": {"requests": {"storage": str(wanted.storage)}},
    }
    if wanted.storage_class_name:
        spec["storageClassName"] = wanted.storage_class_name
    return spec

"""Creation of a job's children, for real or as a dry run. An existing object with the name of a child is never
changed."""

import json
from base64 import b64encode
from collections.abc import Iterable
from secrets import token_bytes

import structlog
from kubernetes.aio.client import ApiException
from pseudoreal_api.names import LABEL_PHASE, RENDEZVOUS_SECRET_FILE, SECRET_BYTES

from pseudoreal_operator.cluster.api import Api, Json, is_already_exists, kind_of, status_of

_FORBIDDEN = 403
_NOT_FOUND = 404

log = structlog.get_logger()


class NameConflict(Exception):
    """An object that does not belong to the job has the name of a child; the message names the object."""


class NotServed(Exception):
    """The cluster does not serve the kind of a child; the message names the kind."""


async def dry_run(api: Api, manifests: Iterable[Json]) -> None:
    """Try to create the Jobs of all stages in a dry run. Raises ApiException for the first rejected Job; the message
    names the phase. Rejections with status 403 are ignored, because a quota may be the reason: a quota depends on
    present objects, and applies when the Job is really created."""
    for manifest in manifests:
        if manifest["kind"] != "Job":
            continue
        try:
            await api.create(manifest, dry_run=True)
        except ApiException as rejection:
            if rejection.status == _FORBIDDEN or is_already_exists(rejection):
                continue
            _add_phase(manifest["metadata"]["labels"][LABEL_PHASE], rejection)
            raise


def _add_phase(phase: str, rejection: ApiException) -> None:
    status = status_of(rejection)
    if "message" in status:
        rejection.body = json.dumps(status | {"message": f"{status['message']} (phase {phase})"})


async def create_child(api: Api, manifest: Json) -> Json:
    """Create a child, and return it as it is stored; accept an existing child with the same owner, created by another
    pass. Raises NameConflict, NotServed, or ApiException."""
    kind, metadata = manifest["kind"], manifest["metadata"]
    try:
        created = await api.create(_with_data(manifest))
    except ApiException as rejection:
        if rejection.status == _NOT_FOUND and kind == "PodGroup":
            raise NotServed(_not_served(manifest["apiVersion"])) from rejection
        if not is_already_exists(rejection):
            raise
        if kind == "Secret":
            # The operator may not read Secrets, so it cannot check the owner. Another author's Secret would expose only
            # this job, and only to that author.
            return manifest
        found = await api.find(kind_of(manifest), metadata["namespace"], metadata["name"])
        # An object that was deleted meanwhile is created by the next pass.
        if found is None:
            raise
        _check_owner(kind, found["metadata"], metadata)
        return found
    log.info("child_created", kind=kind, name=metadata["name"])
    return created


def _with_data(manifest: Json) -> Json:
    """Return the manifest. A Secret gets fresh random data here, so that the data appear in no plan and in no log."""
    if manifest["kind"] != "Secret":
        return manifest
    return manifest | {"data": {RENDEZVOUS_SECRET_FILE: b64encode(token_bytes(SECRET_BYTES)).decode()}}


def _not_served(version: str) -> str:
    return (
        f"The cluster has no PodGroup of {version}, which spec.scheduling.gang.policy asks for. What to do: install the"
        " scheduler that serves it, or suspend the job and set another policy; the job then goes on by itself."
    )


def _check_owner(kind: str, found: Json, wanted: Json) -> None:
    """Raise NameConflict if another owner controls the object found. The manifest of a claim that outlives its job
    names no owner: an existing claim is used, whichever job created it."""
    owner = _controller(wanted)
    if owner is None or _controller(found) == owner:
        return
    raise NameConflict(
        f"{kind} {wanted['name']} in namespace {wanted['namespace']} is not of this job and has the name of one of its"
        f" children. What to do: look whose it is (kubectl describe {kind.lower()} {wanted['name']} -n"
        f" {wanted['namespace']}) and delete it; the job then goes on by itself."
    )


def _controller(metadata: Json) -> str | None:
    """Return the uid of the owner that controls the object; None if there is none."""
    owners = metadata.get("ownerReferences") or []
    return next((owner["uid"] for owner in owners if owner.get("controller")), None)

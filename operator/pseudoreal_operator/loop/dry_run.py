"""Dry run of the Jobs of all stages, before weeks of training depend on them."""

import json
from collections.abc import Iterable

from kubernetes.aio.client import ApiException
from pseudoreal_api.names import LABEL_PHASE

from pseudoreal_operator.cluster.api import Api, Json, is_taken, status_of

_FORBIDDEN = 403


async def dry_run(api: Api, manifests: Iterable[Json]) -> None:
    """Try to create the Jobs of all stages in a dry run. Raises ApiException for the first one that is rejected; its
    message names the phase. Status 403 is ignored: a quota counts present objects and says nothing about the job, so
    it is met when a Job is really created."""
    for manifest in manifests:
        if manifest["kind"] != "Job":
            continue
        try:
            await api.create(manifest, dry_run=True)
        except ApiException as refusal:
            if refusal.status == _FORBIDDEN or is_taken(refusal):
                continue
            _name_phase(manifest["metadata"]["labels"][LABEL_PHASE], refusal)
            raise


def _name_phase(phase: str, refusal: ApiException) -> None:
    said = status_of(refusal)
    if "message" in said:
        refusal.body = json.dumps(said | {"message": f"{said['message']} (phase {phase})"})

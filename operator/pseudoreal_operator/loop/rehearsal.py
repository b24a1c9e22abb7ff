"""Tries the Jobs of all stages on the API server when a job is first seen, without making them."""

import json
from collections.abc import Iterable

from kubernetes.aio.client import ApiException
from pseudoreal_api.names import LABEL_PHASE

from pseudoreal_operator.cluster.api import Api, Json, is_taken, status_of

_FORBIDDEN = 403


async def rehearse(api: Api, trial: Iterable[Json]) -> None:
    """Tries the Jobs of all stages. Raises ApiException for the first one that is refused; its message names the phase.
    A quota counts what is there now and says nothing of the job, so it is met when a Job is really made."""
    for manifest in trial:
        if manifest["kind"] != "Job":
            continue
        try:
            await api.create(manifest, dry_run=True)
        except ApiException as refusal:
            if refusal.status == _FORBIDDEN or is_taken(refusal):
                continue
            _name(manifest["metadata"]["labels"][LABEL_PHASE], refusal)
            raise


def _name(phase: str, refusal: ApiException) -> None:
    said = status_of(refusal)
    if "message" in said:
        refusal.body = json.dumps(said | {"message": f"{said['message']} (phase {phase})"})

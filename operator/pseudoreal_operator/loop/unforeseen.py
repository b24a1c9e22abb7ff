"""What a job's status says when a pass over it ended by a mistake of the operator, could not read that status, or could
write none."""

from datetime import UTC, datetime
from typing import Any

import structlog
from kubernetes.aio.client import ApiException
from pseudoreal_api.base import API_VERSION, KIND
from pydantic import ValidationError

from pseudoreal_operator import clock
from pseudoreal_operator.cluster.api import Api, message_of
from pseudoreal_operator.cluster.retry import UNAVAILABLE
from pseudoreal_operator.foreign import clean
from pseudoreal_operator.loop.computing import Overran

Json = dict[str, Any]

_MANAGER = "pseudoreal-operator-errors"
"""Field manager of this condition alone, so that the rest of the status stays, whoever wrote it."""

log = structlog.get_logger()


async def tell_of_mistake(api: Api, body: Json, error: Exception) -> None:
    """Writes the condition: best effort, and not again while it stands there."""
    await _tell(api, body, *of_mistake(error))


async def tell_of_refusal(api: Api, body: Json, refusal: ApiException) -> None:
    """Writes that the API server takes no form of the job's status: best effort. Where it takes not even what it said
    itself, a sentence of ours."""
    said = "The API server refuses the status of this job, so that nothing is decided any more; its pods run on"
    for text in (f"{said}: {clean(message_of(refusal))}", f"{said}; the operator's log has its answer."):
        if await _tell(api, body, "StatusRefused", text):
            return


async def _tell(api: Api, body: Json, reason: str, message: str) -> bool:
    """Write the condition. Return whether it stands there."""
    said = condition(body, reason, message, datetime.now(UTC))
    if said is None:
        return True
    kept = ("name", "namespace", "resourceVersion")
    metadata = {key: value for key, value in body["metadata"].items() if key in kept}
    status = {"conditions": [said]}
    manifest = {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "status": status}
    try:
        await api.apply(manifest, "status", manager=_MANAGER)
    except UNAVAILABLE as refusal:
        log.warning("mistake_untold", error=str(refusal))
        return False
    return True


def of_mistake(error: Exception) -> tuple[str, str]:
    """Return reason and message of the condition for a mistake of ours. Pure."""
    reason, what = "InternalError", "made a mistake at this job, and tries again"
    if isinstance(error, ValidationError):
        reason, what = "Unreadable", "cannot read this job"
    elif isinstance(error, Overran):
        reason, what = "Unplannable", "cannot plan this job, and leaves it and its pods alone until its spec changes"
    return reason, clean(f"This release of the operator {what}: {type(error).__name__}: {error}")


def condition(body: Json, reason: str, message: str, now: datetime) -> Json | None:
    """The condition to write; None when it is said already, or the job has ended. Pure."""
    known = {c["type"]: c for c in (body.get("status") or {}).get("conditions") or []}
    old = known.get("Progressing", {})
    if (old.get("reason"), old.get("message")) == (reason, message) or {"Complete", "Failed"} & known.keys():
        return None
    same = old.get("status") == "False"
    return {
        "type": "Progressing",
        "status": "False",
        "reason": reason,
        "message": message,
        "lastTransitionTime": old["lastTransitionTime"] if same else clock.to_text(now),
        "observedGeneration": body["metadata"].get("generation", 0),
    }

"""What a job's status says when a pass over it ended by a mistake of the operator, or could not read that status."""

from datetime import UTC, datetime
from typing import Any

import structlog
from pseudoreal_api.base import API_VERSION, KIND
from pydantic import ValidationError

from pseudoreal_operator import clock
from pseudoreal_operator.cluster.api import Api
from pseudoreal_operator.cluster.retry import UNAVAILABLE
from pseudoreal_operator.foreign import clean
from pseudoreal_operator.loop.computing import Overran

Json = dict[str, Any]

_MANAGER = "pseudoreal-operator-errors"
"""Field manager of this condition alone, so that the rest of the status stays, whoever wrote it."""

log = structlog.get_logger()


async def tell_of_mistake(api: Api, body: Json, error: Exception) -> None:
    """Writes the condition: best effort, and not again while it stands there."""
    said = condition(body, error, datetime.now(UTC))
    if said is None:
        return
    kept = ("name", "namespace", "resourceVersion")
    metadata = {key: value for key, value in body["metadata"].items() if key in kept}
    status = {"conditions": [said]}
    manifest = {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "status": status}
    try:
        await api.apply(manifest, "status", manager=_MANAGER)
    except UNAVAILABLE as refusal:
        log.warning("mistake_untold", error=str(refusal))


def condition(body: Json, error: Exception, now: datetime) -> Json | None:
    """The condition to write; None when it is said already, or the job has ended. Pure."""
    known = {c["type"]: c for c in (body.get("status") or {}).get("conditions") or []}
    old = known.get("Progressing", {})
    reason, what = "InternalError", "made a mistake at this job, and tries again"
    if isinstance(error, ValidationError):
        reason, what = "Unreadable", "cannot read this job"
    elif isinstance(error, Overran):
        reason, what = "Unplannable", "cannot plan this job, and leaves it and its pods alone until its spec changes"
    message = clean(f"This release of the operator {what}: {type(error).__name__}: {error}")
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

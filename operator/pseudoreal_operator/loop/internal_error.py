"""Conditions of jobs after a failed pass: after a bug of the operator, for a job that cannot be read, and for a status
that the API server rejects."""

from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

import structlog
from aiohttp import ClientPayloadError
from kubernetes.aio.client import ApiException
from pseudoreal_api.base import API_VERSION, KIND
from pydantic import ValidationError

from pseudoreal_operator import clock
from pseudoreal_operator.cluster.api import Api, Name, message_of
from pseudoreal_operator.cluster.bounds import Unreadable
from pseudoreal_operator.cluster.retry import API_ERRORS
from pseudoreal_operator.loop.planning_thread import Overran
from pseudoreal_operator.untrusted_text import sanitize

Json = dict[str, Any]

_MANAGER = "pseudoreal-operator-errors"
"""Field manager of this condition alone, so that applying the condition keeps the rest of the status."""

_FINAL = (400, 403, 422)
"""HTTP statuses after which nothing is retried."""

log = structlog.get_logger()


class UnreadableJobs:
    """The newest _MOST reports of unreadable jobs: uid -> generation of the spec, and the sentence in the job's
    status."""

    _MOST = 1000

    def __init__(self) -> None:
        self._reported: dict[str, tuple[int, str]] = {}

    def is_known(self, uid: str, generation: int, sentence: str) -> bool:
        return self._reported.get(uid) == (generation, sentence)

    def note(self, uid: str, generation: int, sentence: str) -> None:
        self._reported.pop(uid, None)
        self._reported[uid] = generation, sentence
        while len(self._reported) > self._MOST:
            del self._reported[next(iter(self._reported))]


async def report_unreadable(api: Api, name: Name, reason: Unreadable, reported: UnreadableJobs) -> None:
    """Report in a job's status that the job is beyond a bound, once for each generation of its spec."""
    metadata = await api.find_metadata("PseudoRealJob", *name)
    if metadata is None:
        return
    uid, generation = str(metadata.get("uid", "")), int(metadata.get("generation", 0))
    if not uid:
        raise ClientPayloadError("the answer is no object of Kubernetes") from reason
    sentence = sanitize(
        f"The operator cannot read this job: {reason}. It is left alone, and its pods run on. What to do: make spec"
        " smaller, above all spec.pod.template, or delete the job."
    )
    if reported.is_known(uid, generation, sentence):
        return
    written = {
        "type": "Progressing",
        "status": "False",
        "reason": "Unreadable",
        "message": sentence,
        "lastTransitionTime": clock.to_text(datetime.now(UTC)),
        "observedGeneration": generation,
    }
    try:
        await _apply(api, {"namespace": name.namespace, "name": name.name, "uid": uid}, written)
    except ApiException as rejection:
        if rejection.status not in _FINAL:
            raise
        log.warning("unreadable_job_not_reported", status=rejection.status, error=message_of(rejection))
    reported.note(uid, generation, sentence)


async def report_internal_error(api: Api, body: Json, error: Exception) -> None:
    """Write the condition of an internal error, best effort, unless the status has it already."""
    await _write_condition(api, body, *reason_and_message(error))


async def report_rejection(api: Api, body: Json, rejection: ApiException) -> None:
    """Write the condition StatusRefused, best effort: the API server rejects the job's status, even without texts and
    figures. If the API server rejects its own message too, write a sentence without that message."""
    sentence = "The API server refuses the status of this job, so that nothing is decided any more; its pods run on"
    for text in (f"{sentence}: {sanitize(message_of(rejection))}", f"{sentence}; the operator's log has its answer."):
        if await _write_condition(api, body, "StatusRefused", text):
            return


async def _write_condition(api: Api, body: Json, reason: str, message: str) -> bool:
    """Write the condition; return whether the status has it."""
    written = condition(body, reason, message, datetime.now(UTC))
    if written is None:
        return True
    kept = ("name", "namespace", "resourceVersion")
    metadata = {key: value for key, value in body["metadata"].items() if key in kept}
    try:
        await _apply(api, metadata, written)
    except API_ERRORS as rejection:
        log.warning("condition_not_written", reason=reason, error=str(rejection))
        return False
    return True


def reason_and_message(error: Exception) -> tuple[str, str]:
    """Return reason and message of the condition for an error of a pass. Pure."""
    reason, what = "InternalError", "made a mistake at this job, and tries again"
    if isinstance(error, ValidationError | Unreadable):
        reason, what = "Unreadable", "cannot read this job"
    elif isinstance(error, Overran):
        reason, what = "Unplannable", "cannot plan this job, and leaves it and its pods alone until its spec changes"
    return reason, sanitize(f"This release of the operator {what}: {type(error).__name__}: {error}")


async def _apply(api: Api, metadata: Json, condition: Json) -> None:
    manifest = {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "status": {"conditions": [condition]}}
    with suppress(Unreadable):  # it was written; only the answer, the whole job, is too large
        await api.apply(manifest, "status", manager=_MANAGER)


def condition(body: Json, reason: str, message: str, now: datetime) -> Json | None:
    """Return the condition to write; None if the status has the condition already, or the job has ended. Pure."""
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

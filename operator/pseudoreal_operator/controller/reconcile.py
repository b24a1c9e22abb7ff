"""One pass over one job: observe, plan, carry out."""

import socket
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import structlog
from kubernetes.aio.client import ApiException
from pseudoreal_api.base import API_VERSION, KIND
from pseudoreal_api.names import ANNOTATION_FINISH_PHASE
from pseudoreal_api.spec import JobMetadata, PseudoRealJob
from pseudoreal_api.status import PseudoRealJobStatus
from pydantic import ValidationError

from pseudoreal_operator.cluster.api import Api, message_of
from pseudoreal_operator.decide.plan import Plan, plan, plan_hindrance, plan_refusal, plan_unreadable
from pseudoreal_operator.observe.board import Board
from pseudoreal_operator.observe.observed import Observed
from pseudoreal_operator.observe.requests import observe
from pseudoreal_operator.settings import Settings
from pseudoreal_operator.tell.events import Event, to_manifest

_INVALID = (400, 422)
_FORBIDDEN = 403
_CONFLICT = 409
_SERVER_ERROR = 500
_AGAIN_SECONDS = 0.1

log = structlog.get_logger()


class Gone(Exception):
    """The job is deleted, or being deleted: its children go with it."""


@dataclass(frozen=True)
class Identity:
    namespace: str
    name: str
    uid: str


@dataclass(frozen=True)
class _Read:
    """What a pass begins with, and the version of the object that said so."""

    metadata: JobMetadata
    status: PseudoRealJobStatus
    version: str


async def reconcile(api: Api, board: Board, settings: Settings, who: Identity) -> float | None:
    """Seconds until the next pass is due; None for not before something changes.

    Raises Gone; ApiException and OSError, after which another pass will find its way.
    """
    body = await api.find("PseudoRealJob", who.namespace, who.name)
    if body is None or body["metadata"]["uid"] != who.uid or "deletionTimestamp" in body["metadata"]:
        raise Gone
    now = datetime.now(UTC)
    metadata = JobMetadata.model_validate(body["metadata"])
    status = PseudoRealJobStatus.model_validate(body.get("status") or {})
    read = _Read(metadata, status, body["metadata"]["resourceVersion"])
    try:
        job = PseudoRealJob.from_object(body)
    except ValidationError as error:
        sentence = f"This release of the operator cannot read the job: {error}"
        return await _carry_out(api, read, plan_unreadable(metadata, status, sentence, now))
    board.follow((who.namespace, who.uid), metadata.annotations.get(ANNOTATION_FINISH_PHASE))
    seen = await observe(api, board, job, status, now)
    return await _attempt(api, read, seen, plan(seen, now, settings), now)


async def _attempt(api: Api, read: _Read, seen: Observed, wanted: Plan, now: datetime) -> float | None:
    """Carries the plan out; when the API server refuses a child, says so in the status."""
    metadata = read.metadata
    if wanted.expire:
        await api.delete("PseudoRealJob", metadata.namespace, metadata.name, metadata.uid)
        log.info("expired", completed=seen.status.completion_time)
        return None
    try:
        await _delete(api, metadata, wanted)
        for manifest in wanted.apply:
            await api.apply(manifest)
            log.info("applied", kind=manifest["kind"], name=manifest["metadata"]["name"])
    except ApiException as error:
        text = f"The API server refuses a change of this job's children: {message_of(error)}"
        if error.status in _INVALID and not _is_of_a_policy(text):
            return await _carry_out(api, read, plan_refusal(seen, text, now))
        if error.status in (*_INVALID, _FORBIDDEN) or error.status >= _SERVER_ERROR:
            log.warning("hindered", error=text)
            return await _carry_out(api, read, plan_hindrance(seen, text, now))
        raise
    return await _tell(api, read, wanted)


async def _carry_out(api: Api, read: _Read, wanted: Plan) -> float | None:
    """A plan that makes no children."""
    await _delete(api, read.metadata, wanted)
    return await _tell(api, read, wanted)


async def _delete(api: Api, metadata: JobMetadata, wanted: Plan) -> None:
    for name in wanted.delete:
        await api.delete("Job", metadata.namespace, name)
        log.info("deleted", kind="Job", name=name)


async def _tell(api: Api, read: _Read, wanted: Plan) -> float | None:
    """Events come before the status that records their transition: a crash between the two loses none."""
    for event in wanted.events:
        await _post(api, read.metadata, event)
    if wanted.status == read.status:
        return wanted.wake_after
    try:
        await api.apply(_status_manifest(read, wanted.status), "status")
    except ApiException as error:
        if error.status != _CONFLICT:
            raise
        return _AGAIN_SECONDS
    return wanted.wake_after


async def _post(api: Api, metadata: JobMetadata, event: Event) -> None:
    try:
        await api.post(to_manifest(event, metadata, datetime.now(UTC), socket.gethostname()))
    except ApiException as error:
        if error.status not in (*_INVALID, _FORBIDDEN):
            raise
        # A namespace that takes no more events must not hold up its jobs.
        log.warning("event_refused", reason=event.reason.value, error=message_of(error))
    else:
        log.info("event", reason=event.reason.value, message=event.message)


def _is_of_a_policy(text: str) -> bool:
    """Policies answer with the codes of an invalid object, too."""
    return "admission webhook" in text or "ValidatingAdmissionPolicy" in text


def _status_manifest(read: _Read, status: PseudoRealJobStatus) -> dict[str, Any]:
    # With the version, a job that somebody changed after it was read is a conflict, and so is another job of that name:
    # a status is written whatever the uid is.
    metadata = {"name": read.metadata.name, "namespace": read.metadata.namespace, "resourceVersion": read.version}
    return {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "status": status.to_dict()}

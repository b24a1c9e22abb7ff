"""One pass over one job: observe, plan, carry out."""

import socket
from dataclasses import dataclass
from datetime import UTC, datetime

import structlog
from kubernetes.aio.client import ApiException
from pseudoreal_api.base import API_VERSION, KIND
from pseudoreal_api.names import ANNOTATION_FINISH_PHASE
from pseudoreal_api.spec import JobMetadata, PseudoRealJob
from pseudoreal_api.status import PseudoRealJobStatus
from pydantic import ValidationError

from pseudoreal_operator.cluster.api import Api, message_of
from pseudoreal_operator.cluster.creation import NameConflict, make
from pseudoreal_operator.controller.counts import Counts
from pseudoreal_operator.decide.plan import Plan, plan, plan_conflict, plan_hindrance, plan_refusal, plan_unreadable
from pseudoreal_operator.decide.stopping import STOP_SECONDS
from pseudoreal_operator.foreign import clean
from pseudoreal_operator.observe.board import Board
from pseudoreal_operator.observe.observed import Observed
from pseudoreal_operator.observe.requests import observe
from pseudoreal_operator.settings import Settings
from pseudoreal_operator.tell.events import Event, to_manifest
from pseudoreal_operator.tell.refused import texts_of, without_texts

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


async def reconcile(api: Api, board: Board, settings: Settings, counts: Counts, who: Identity) -> float | None:
    """Seconds until the next pass is due; None for not before something changes.

    Raises Gone; ApiException and OSError, after which another pass will find its way.
    """
    body = await api.find("PseudoRealJob", who.namespace, who.name)
    if body is None or body["metadata"]["uid"] != who.uid or "deletionTimestamp" in body["metadata"]:
        raise Gone
    now = datetime.now(UTC)
    metadata = JobMetadata.model_validate(body["metadata"])
    status = PseudoRealJobStatus.model_validate(body.get("status") or {})
    hands = _Hands(api, metadata, status, body["metadata"]["resourceVersion"], counts)
    try:
        job = PseudoRealJob.from_object(body)
    except ValidationError as error:
        sentence = f"This release of the operator cannot read the job: {clean(str(error))}"
        return await hands.carry_out(plan_unreadable(metadata, status, sentence, now))
    board.follow((who.namespace, who.uid), metadata.annotations.get(ANNOTATION_FINISH_PHASE))
    seen = await observe(api, board, job, status, now)
    wanted = plan(seen, now, settings)
    if wanted.expire:
        await hands.expire()
        return None
    try:
        refusal = await hands.try_children(wanted)
    except NameConflict as conflict:
        return await hands.carry_out(plan_conflict(seen, str(conflict), now))
    return await (hands.tell(wanted) if refusal is None else hands.carry_out(_answer_to(refusal, seen, now)))


def _answer_to(refusal: ApiException, seen: Observed, now: datetime) -> Plan:
    """What a child that the API server refuses means. Raises the refusal when it is for another pass."""
    text = f"The API server refuses a change of this job's children: {message_of(refusal)}"
    if refusal.status in _INVALID and not _is_of_a_policy(text):
        return plan_refusal(seen, text, now)
    if refusal.status in (*_INVALID, _FORBIDDEN) or refusal.status >= _SERVER_ERROR:
        log.warning("hindered", error=text)
        return plan_hindrance(seen, text, now)
    raise refusal


@dataclass(frozen=True)
class _Hands:
    """Carries out plans for one job. `status` and `version`: of the object that the plan was made for."""

    api: Api
    metadata: JobMetadata
    status: PseudoRealJobStatus
    version: str
    counts: Counts

    async def expire(self) -> None:
        await self.api.delete("PseudoRealJob", self.metadata.namespace, self.metadata.name, self.metadata.uid)
        log.info("expired", completed=self.status.completion_time)

    async def try_children(self, wanted: Plan) -> ApiException | None:
        """What the API server refused."""
        try:
            await self._remove(wanted)
            for manifest in wanted.apply:
                await make(self.api, manifest)
        except ApiException as refusal:
            return refusal
        return None

    async def carry_out(self, wanted: Plan) -> float | None:
        """A plan that makes no children."""
        await self._remove(wanted)
        return await self.tell(wanted)

    async def tell(self, wanted: Plan) -> float | None:
        """Events come before the status that records their transition: a crash between the two loses none."""
        for event in wanted.events:
            await self._post(event)
        if wanted.status == self.status:
            return wanted.wake_after
        try:
            await self._write(wanted.status)
        except ApiException as error:
            if error.status != _CONFLICT:
                raise
            return _AGAIN_SECONDS
        return wanted.wake_after

    async def _remove(self, wanted: Plan) -> None:
        namespace = self.metadata.namespace
        for name in wanted.stop:
            await self.api.delete("Pod", namespace, name, grace_seconds=STOP_SECONDS)
            log.info("stopped", pod=name, seconds=STOP_SECONDS)
        for name in wanted.give_up:
            # One failed index is more than none.
            await self.api.merge("Job", namespace, name, {"spec": {"maxFailedIndexes": 0}})
            log.info("given_up", kind="Job", name=name)
        for name in wanted.delete:
            await self.api.delete("Job", namespace, name)
            log.info("deleted", kind="Job", name=name)

    async def _post(self, event: Event) -> None:
        try:
            await self.api.post(to_manifest(event, self.metadata, datetime.now(UTC), socket.gethostname()))
        except ApiException as error:
            if error.status not in (*_INVALID, _FORBIDDEN):
                raise
            # A namespace that takes no more events must not hold up its jobs.
            log.warning("event_refused", reason=event.reason.value, error=message_of(error))
        else:
            log.info("event", reason=event.reason.value, message=event.message)

    async def _write(self, status: PseudoRealJobStatus) -> None:
        """A status that is refused is written without its texts: no job stands still for what somebody said."""
        try:
            await self._apply(status)
        except ApiException as error:
            bare = without_texts(status)
            if error.status not in (*_INVALID, _FORBIDDEN) or bare == status:
                raise
            self.counts.refused_statuses += 1
            count, said = self.counts.refused_statuses, message_of(error)
            log.error("status_refused", status=error.status, error=said, texts=texts_of(status), count=count)
            if bare != self.status:
                await self._apply(bare)

    async def _apply(self, status: PseudoRealJobStatus) -> None:
        # With the version, a job that somebody changed after it was read is a conflict, and so is another job of that
        # name: a status is written whatever the uid is.
        name, namespace = self.metadata.name, self.metadata.namespace
        metadata = {"name": name, "namespace": namespace, "resourceVersion": self.version}
        manifest = {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "status": status.to_dict()}
        await self.api.apply(manifest, "status")


def _is_of_a_policy(text: str) -> bool:
    """Policies answer with the codes of an invalid object, too."""
    return "admission webhook" in text or "ValidatingAdmissionPolicy" in text

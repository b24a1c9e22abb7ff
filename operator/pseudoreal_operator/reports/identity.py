"""Who reports: the pod that a service-account token was made for, and the job that it belongs to."""

import hashlib
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from pseudoreal_api.names import LABEL_JOB_UID
from pseudoreal_api.reports import REPORT_AUDIENCE

from pseudoreal_operator.api import Api
from pseudoreal_operator.observed import Role
from pseudoreal_operator.reading import read_pod
from pseudoreal_operator.reports.board import Speaker
from pseudoreal_operator.reports.limits import Limiter

Json = dict[str, Any]

BELIEVED_SECONDS = 60.0
"""How long a review of a token is believed: its pod may be deleted meanwhile."""
_REMEMBERED = 20_000
_USER = "system:serviceaccount:"
_POD_NAME, _POD_UID = "authentication.kubernetes.io/pod-name", "authentication.kubernetes.io/pod-uid"


class NotAllowed(Exception):
    """`status` is the HTTP status; the text says why."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


@dataclass(frozen=True)
class _Pod:
    namespace: str
    name: str
    uid: str


class Identities:
    """Reviews tokens, and remembers for a while what came of it."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._known: OrderedDict[str, tuple[float, Speaker]] = OrderedDict()
        # Reviews cost the API server something, and anybody can send a token that it must refuse.
        self._reviews = Limiter(per_second=50, burst=200)

    async def of(self, token: str) -> Speaker:
        """Raises NotAllowed; ApiException and OSError when the API server cannot tell."""
        key = hashlib.sha256(token.encode()).hexdigest()
        moment, speaker = self._known.get(key, (0.0, None))
        if speaker is not None and time.monotonic() - moment < BELIEVED_SECONDS:
            return speaker
        if not self._reviews.allows("all"):
            raise NotAllowed(429, "too many tokens at once; report again later")
        speaker = await self._reviewed(token)
        self._known[key] = (time.monotonic(), speaker)
        if len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)
        return speaker

    async def _reviewed(self, token: str) -> Speaker:
        pod = pod_of_review(await self._api.ask(_review(token)))
        body = await self._api.find("Pod", pod.namespace, pod.name)
        if body is None or body["metadata"]["uid"] != pod.uid:
            raise NotAllowed(403, f"pod {pod.name} of this token is gone")
        return speaker_of(body)


def pod_of_review(review: Json) -> _Pod:
    """The pod that a TokenReview tells of. Raises NotAllowed."""
    status = review.get("status", {})
    if not status.get("authenticated") or REPORT_AUDIENCE not in (status.get("audiences") or []):
        raise NotAllowed(401, "the token is not valid for this audience")
    user = status.get("user", {})
    extra = user.get("extra") or {}
    name, uid = (next(iter(extra.get(key) or []), "") for key in (_POD_NAME, _POD_UID))
    account = user.get("username", "")
    if not account.startswith(_USER) or not name or not uid:
        raise NotAllowed(403, "only pods report, with the token that was projected into them")
    return _Pod(account.removeprefix(_USER).split(":")[0], name, uid)


def speaker_of(body: Json) -> Speaker:
    """Raises NotAllowed for a pod that trains nothing."""
    job = (body["metadata"].get("labels") or {}).get(LABEL_JOB_UID)
    pod = read_pod(body) if job else None
    if job is None or pod is None or pod.run.role is not Role.TRAIN:
        raise NotAllowed(403, f"pod {body['metadata']['name']} trains no PseudoRealJob")
    return Speaker(job, pod.run, pod.index)


def _review(token: str) -> Json:
    return {
        "apiVersion": "authentication.k8s.io/v1",
        "kind": "TokenReview",
        "spec": {"token": token, "audiences": [REPORT_AUDIENCE]},
    }

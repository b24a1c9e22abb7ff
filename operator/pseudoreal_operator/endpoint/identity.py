"""Who reports: the pod that a service-account token was made for, and the job that it belongs to.

The API server says so, in a review of the token; what the token claims of itself is only used to share out the reviews,
and, once it was reviewed, for how long that holds.
"""

import hashlib
import json
import time
from base64 import urlsafe_b64decode
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import Any

from pseudoreal_api.names import LABEL_JOB_UID
from pseudoreal_api.wire.reports import REPORT_AUDIENCE

from pseudoreal_operator.cluster.api import Api
from pseudoreal_operator.endpoint.address import sources_of
from pseudoreal_operator.endpoint.limits import Clock, Limiter
from pseudoreal_operator.observe.board import Speaker
from pseudoreal_operator.observe.reading import read_pod
from pseudoreal_operator.observe.stages import StageKind

Json = dict[str, Any]

BELIEVED_SECONDS, LEAST_BELIEVED_SECONDS = 3600.0, 10.0
"""Most seconds for which a review of a token is believed, unless its pod changes meanwhile: as long as kubelets let a
token live. A token that says when it expires is believed until then; and for the least seconds, where the API server
takes it although our clock says that it has expired."""
DENIED_SECONDS = 30.0
"""Seconds for which a token that was refused is refused again without a review."""
DOUBTED_SECONDS = 60.0
"""Seconds after a refusal for which an address gets its reviews of what is left for such addresses."""
REVIEWS_PER_SECOND, REVIEWS_AT_ONCE = 50, 200
"""Limits on reviews of all tokens together: each costs the API server something."""
SHARE_PER_SECOND, SHARE_AT_ONCE = 10, 50
"""Reviews that a namespace has in any case. Beyond them, it gets as many as leave half of all for the others."""
REFUSALS_PER_SECOND, REFUSALS_AT_ONCE = 1, 50
"""Limits on refusals of one address, so that a flood of wrong tokens from one does not silence the others. Behind one
address there may be many pods: tokens that turn out good do not count."""
NETWORK_FACTOR = 10
"""How many times as many refusals an IPv6 network may have."""
_REMEMBERED = 20_000
_MOST_CLAIMS = 8192
"""Most characters of a token whose claims are read; a header holds no more."""
_MOST_NAMESPACE = 63
_MOST_SECONDS = 1e12
"""Bound of times that are read, in seconds since 1970."""
_NOBODY = ""
"""The namespace of tokens that claim none, and of addresses whose tokens are doubted."""
_REMEMBERED_GONE = 1000
_USER = "system:serviceaccount:"
_POD_NAME, _POD_UID = "authentication.kubernetes.io/pod-name", "authentication.kubernetes.io/pod-uid"


class Refused(Exception):
    """A report that is refused. `status` is the HTTP status; the text says why."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


@dataclass(frozen=True)
class TokenPod:
    """The pod that a token was made for."""

    namespace: str
    name: str
    uid: str


@dataclass(frozen=True)
class _Belief:
    until: float
    pod: str
    """Uid of the pod."""
    speaker: Speaker


class Identities:
    """Reviews tokens. The result is remembered as long as the watch of the pods tells of no change of the pod that
    speaks. No `namespaces`: all are watched."""

    def __init__(
        self, api: Api, namespaces: tuple[str, ...], clock: Clock = time.monotonic, wall: Clock = time.time
    ) -> None:
        """`wall`: the clock by which tokens expire, in seconds since 1970."""
        self._api, self._namespaces, self._clock, self._wall = api, namespaces, clock, wall
        self._known: OrderedDict[str, _Belief] = OrderedDict()
        """Token -> what is believed of it; at most one token of each pod."""
        self._tokens: dict[str, str] = {}
        """Uid of a pod -> its token."""
        self._gone: deque[str] = deque(maxlen=_REMEMBERED_GONE)
        """Pods that were deleted, perhaps while their tokens were reviewed."""
        self._denied: OrderedDict[str, tuple[float, Refused]] = OrderedDict()
        """Token -> until when it is refused, and how."""
        self._doubted: OrderedDict[str, float] = OrderedDict()
        """Address -> until when its tokens are doubted."""
        self._reviews = Limiter(REVIEWS_PER_SECOND, REVIEWS_AT_ONCE, clock)
        self._shares = Limiter(SHARE_PER_SECOND, SHARE_AT_ONCE, clock)
        self._refusals = (
            Limiter(REFUSALS_PER_SECOND, REFUSALS_AT_ONCE, clock),
            Limiter(REFUSALS_PER_SECOND * NETWORK_FACTOR, REFUSALS_AT_ONCE * NETWORK_FACTOR, clock),
        )

    async def of(self, token: str, address: str) -> Speaker:
        """The pod that speaks with a token. Raises Refused; ApiException and OSError when the API server cannot
        tell."""
        # Secrets are not kept, and a digest is short however long the token is.
        key = hashlib.sha256(token.encode()).hexdigest()
        now, sources = self._clock(), sources_of(address)
        belief = self._known.get(key)
        if belief is not None and now < belief.until:
            return belief.speaker
        until, refused = self._denied.get(key, (0.0, None))
        if refused is not None and now < until:
            raise Refused(refused.status, str(refused))
        claims = _claims_of(token)
        share = _NOBODY if now < self._doubted.get(sources[0], 0.0) else _namespace_of(claims)
        if not (self._may_be_refused(sources) and self._gets_review(share)):
            raise Refused(429, "too many unknown tokens; report again later")
        try:
            pod, speaker = await self._reviewed(token)
        except Refused as refusal:
            _keep(self._denied, key, (now + DENIED_SECONDS, refusal))
            _keep(self._doubted, sources[0], now + DOUBTED_SECONDS)
            if share != _NOBODY:
                # Whoever forges tokens of a namespace takes nothing from it.
                self._shares.give_back(share)
            raise
        for source, limit in zip(sources, self._refusals, strict=False):
            limit.give_back(source)
        self._remember(key, _Belief(now + self._lifetime(claims), pod, speaker))
        return speaker

    def _may_be_refused(self, sources: tuple[str, ...]) -> bool:
        return all(limit.allows(source) for source, limit in zip(sources, self._refusals, strict=False))

    def _gets_review(self, share: str) -> bool:
        if not self._shares.allows(share) and self._reviews.left("all") <= REVIEWS_AT_ONCE / 2:
            return False
        return self._reviews.allows("all")

    def _lifetime(self, claims: Json) -> float:
        """Seconds for which a review is believed of a token with these claims, which are true if the token is good."""
        expires = claims.get("exp")
        if not isinstance(expires, int | float) or not abs(expires) < _MOST_SECONDS:
            return BELIEVED_SECONDS
        return min(BELIEVED_SECONDS, max(LEAST_BELIEVED_SECONDS, expires - self._wall()))

    def pod_changed(self, change: str, body: Json) -> None:
        """Takes a change that the watch tells. A pod whose labels changed speaks for another job, or for none."""
        pod = body["metadata"]["uid"]
        if change == "DELETED":
            self._gone.append(pod)
        known = self._known.get(self._tokens.get(pod, ""))
        if known is not None and (change == "DELETED" or not _speaks_as(known.speaker, body)):
            self._forget(pod)

    def changes_missed(self) -> None:
        self._known.clear()
        self._tokens.clear()

    async def _reviewed(self, token: str) -> tuple[str, Speaker]:
        pod = pod_of_review(await self._api.ask(_review(token)))
        if self._namespaces and pod.namespace not in self._namespaces:
            raise Refused(403, f"this operator does not watch namespace {pod.namespace}")
        body = await self._api.find("Pod", pod.namespace, pod.name)
        if body is None or body["metadata"]["uid"] != pod.uid:
            raise Refused(403, f"pod {pod.name} of this token is gone")
        return pod.uid, speaker_of(body)

    def _remember(self, key: str, belief: _Belief) -> None:
        if belief.pod in self._gone:
            return
        self._forget(belief.pod)
        self._known[key], self._tokens[belief.pod] = belief, key
        if len(self._known) > _REMEMBERED:
            self._forget(next(iter(self._known.values())).pod)

    def _forget(self, pod: str) -> None:
        if key := self._tokens.pop(pod, None):
            del self._known[key]


def _keep(those: OrderedDict[str, Any], key: str, value: object) -> None:
    those[key] = value
    those.move_to_end(key)
    if len(those) > _REMEMBERED:
        those.popitem(last=False)


def _claims_of(token: str) -> Json:
    """What a token claims of itself; nothing where that cannot be read."""
    try:
        _, claims, _ = token[:_MOST_CLAIMS].split(".")
        found = json.loads(urlsafe_b64decode(claims + "=" * (-len(claims) % 4)))
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _namespace_of(claims: Json) -> str:
    """The namespace of the account that a token claims to be of."""
    account = claims.get("sub")
    is_account = isinstance(account, str) and account.startswith(_USER)
    return str(account).removeprefix(_USER).split(":")[0][:_MOST_NAMESPACE] if is_account else _NOBODY


def _speaks_as(speaker: Speaker, body: Json) -> bool:
    try:
        return speaker_of(body) == speaker
    except Refused:
        return False


def pod_of_review(review: Json) -> TokenPod:
    """The pod that a TokenReview tells of. Raises Refused."""
    status = review.get("status", {})
    if not status.get("authenticated") or REPORT_AUDIENCE not in (status.get("audiences") or []):
        raise Refused(401, f"the token is not valid, or not for audience {REPORT_AUDIENCE}")
    user = status.get("user", {})
    extra = user.get("extra") or {}
    name, uid = (next(iter(extra.get(key) or []), "") for key in (_POD_NAME, _POD_UID))
    account = user.get("username", "")
    if not account.startswith(_USER) or not name or not uid:
        raise Refused(403, "only pods report, with the token that was projected into them")
    return TokenPod(account.removeprefix(_USER).split(":")[0], name, uid)


def speaker_of(body: Json) -> Speaker:
    """The pod as its labels say. Raises Refused for a pod that trains nothing."""
    metadata = body["metadata"]
    stranger = Refused(403, f"pod {metadata['name']} trains no PseudoRealJob")
    try:
        job, pod = metadata["labels"][LABEL_JOB_UID], read_pod(body)
    except (KeyError, ValueError):
        raise stranger from None
    if pod.execution.kind is not StageKind.TRAIN:
        raise stranger
    return Speaker((metadata["namespace"], job), pod.execution, pod.index, pod.name)


def _review(token: str) -> Json:
    return {
        "apiVersion": "authentication.k8s.io/v1",
        "kind": "TokenReview",
        "spec": {"token": token, "audiences": [REPORT_AUDIENCE]},
    }

"""Identity of a reporting pod: the pod that a service-account token was issued for, and its job.

The API server confirms the identity in a TokenReview. The claims of the token itself only decide which share of the
reviews is used and, after a review, how long its result is used.
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
from pseudoreal_operator.endpoint.limits import Clock, Limiter, sources_of
from pseudoreal_operator.observe.reading import read_pod
from pseudoreal_operator.observe.report_store import ReportingPod
from pseudoreal_operator.observe.stages import StageKind

Json = dict[str, Any]

RESULT_SECONDS, LEAST_RESULT_SECONDS = 3600.0, 10.0
"""Maximum and minimum seconds for which the result of a review is used, unless its pod changes. In between, the result
is used until the token expires. The maximum is the lifetime of a kubelet's tokens, and applies if a token names no
expiry. The minimum applies if the API server accepts a token that has expired by the operator's clock."""
REJECTION_SECONDS = 30.0
"""Seconds for which a rejected token is rejected again without a review."""
SUSPECT_SECONDS = 60.0
"""Seconds for which an address is suspect after one of its tokens was rejected. Reviews for suspect addresses use the
share of tokens without a namespace."""
REVIEWS_PER_SECOND, REVIEWS_AT_ONCE = 50, 200
"""Limits on reviews of all tokens together, because each review is a request to the API server."""
SHARE_PER_SECOND, SHARE_AT_ONCE = 10, 50
"""Limits on each namespace's own share of the reviews. Beyond its share, a namespace gets reviews only while more than
half of the common limit is left for the others."""
REJECTIONS_PER_SECOND, REJECTIONS_AT_ONCE = 1, 50
"""Limits on rejections per address, so that a flood of wrong tokens from one address does not silence the others.
Many pods may share an address: tokens that turn out valid do not count."""
NETWORK_FACTOR = 10
"""Limits on rejections of an IPv6 network, as a multiple of the limits of an address."""
_REMEMBERED = 20_000
_MOST_CLAIMS = 8192
"""Maximum number of characters of a token that are parsed for claims; a header holds no more."""
_MOST_NAMESPACE = 63
_MOST_SECONDS = 1e12
"""Largest accepted expiry of a token, in seconds since 1970."""
_NO_NAMESPACE = ""
"""Share of the reviews for tokens that claim no namespace, and for suspect addresses."""
_MOST_DELETED_PODS = 1000
_USER = "system:serviceaccount:"
_POD_NAME, _POD_UID = "authentication.kubernetes.io/pod-name", "authentication.kubernetes.io/pod-uid"


class Rejected(Exception):
    """A report is rejected. `status`: the HTTP status; the text says why."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


@dataclass(frozen=True)
class TokenPod:
    """The pod that a token was issued for."""

    namespace: str
    name: str
    uid: str


@dataclass(frozen=True)
class _ReviewResult:
    until: float
    pod: str
    """Uid of the pod."""
    reporter: ReportingPod


class Identities:
    """Identities of pods, from reviews of their tokens. A result is used until it expires, or until the watch reports a
    change of the pod's identity. Empty `namespaces`: all are watched."""

    def __init__(
        self, api: Api, namespaces: tuple[str, ...], clock: Clock = time.monotonic, wall: Clock = time.time
    ) -> None:
        """`wall`: clock by which tokens expire, in seconds since 1970."""
        self._api, self._namespaces, self._clock, self._wall = api, namespaces, clock, wall
        self._results: OrderedDict[str, _ReviewResult] = OrderedDict()
        """Digest of a token -> result of its review; at most one token of each pod."""
        self._tokens: dict[str, str] = {}
        """Uid of a pod -> digest of its token."""
        self._deleted_pods: deque[str] = deque(maxlen=_MOST_DELETED_PODS)
        """Uids of the newest deleted pods: reviews of their tokens may have been in progress."""
        self._rejected: OrderedDict[str, tuple[float, Rejected]] = OrderedDict()
        """Digest of a rejected token -> end of the rejection by `clock`, and the rejection."""
        self._suspects: OrderedDict[str, float] = OrderedDict()
        """Address -> time until which it is a suspect, by `clock`."""
        self._reviews = Limiter(REVIEWS_PER_SECOND, REVIEWS_AT_ONCE, clock)
        self._shares = Limiter(SHARE_PER_SECOND, SHARE_AT_ONCE, clock)
        self._rejections = (
            Limiter(REJECTIONS_PER_SECOND, REJECTIONS_AT_ONCE, clock),
            Limiter(REJECTIONS_PER_SECOND * NETWORK_FACTOR, REJECTIONS_AT_ONCE * NETWORK_FACTOR, clock),
        )

    async def authenticate(self, token: str, address: str) -> ReportingPod:
        """Return the pod that reports with a token. Raises Rejected; ApiException, ClientError, OSError or Unreadable
        if the API server gives no usable answer."""
        # Keep a digest, not the secret; a digest is short however long the token is.
        key = hashlib.sha256(token.encode()).hexdigest()
        now, sources = self._clock(), sources_of(address)
        result = self._results.get(key)
        if result is not None and now < result.until:
            return result.reporter
        until, rejected = self._rejected.get(key, (0.0, None))
        if rejected is not None and now < until:
            raise Rejected(rejected.status, str(rejected))
        claims = _claims_of(token)
        share = _NO_NAMESPACE if now < self._suspects.get(sources[0], 0.0) else _namespace_of(claims)
        if not (self._may_be_rejected(sources) and self._takes_review(share)):
            raise Rejected(429, "too many unknown tokens; report again later")
        try:
            pod, reporter = await self._review_token(token)
        except Rejected as rejection:
            _remember_newest(self._rejected, key, (now + REJECTION_SECONDS, rejection))
            _remember_newest(self._suspects, sources[0], now + SUSPECT_SECONDS)
            if share != _NO_NAMESPACE:
                # Forged tokens that claim a namespace must not use up the share of the namespace.
                self._shares.give_back(share)
            raise
        for source, limit in zip(sources, self._rejections, strict=False):
            limit.give_back(source)
        self._remember(key, _ReviewResult(now + self._lifetime(claims), pod, reporter))
        return reporter

    def _may_be_rejected(self, sources: tuple[str, ...]) -> bool:
        return all(limit.allows(source) for source, limit in zip(sources, self._rejections, strict=False))

    def _takes_review(self, share: str) -> bool:
        if not self._shares.allows(share) and self._reviews.left("all") <= REVIEWS_AT_ONCE / 2:
            return False
        return self._reviews.allows("all")

    def _lifetime(self, claims: Json) -> float:
        """Return the seconds for which the review of a token with these claims is used; the claims are true if
        the token is valid."""
        expires = claims.get("exp")
        if not isinstance(expires, int | float) or not abs(expires) < _MOST_SECONDS:
            return RESULT_SECONDS
        return min(RESULT_SECONDS, max(LEAST_RESULT_SECONDS, expires - self._wall()))

    def pod_changed(self, change: str, body: Json) -> None:
        """Process a change from the watch of pods. After a change of its labels, a pod may report for another job, or
        for none."""
        pod = body["metadata"]["uid"]
        if change == "DELETED":
            self._deleted_pods.append(pod)
        known = self._results.get(self._tokens.get(pod, ""))
        if known is not None and (change == "DELETED" or not _is_still(known.reporter, body)):
            self._forget(pod)

    def changes_missed(self) -> None:
        self._results.clear()
        self._tokens.clear()

    async def _review_token(self, token: str) -> tuple[str, ReportingPod]:
        pod = pod_of_review(await self._api.create_review(_token_review(token)))
        if self._namespaces and pod.namespace not in self._namespaces:
            raise Rejected(403, f"this operator does not watch namespace {pod.namespace}")
        body = await self._api.find("Pod", pod.namespace, pod.name)
        if body is None or body["metadata"]["uid"] != pod.uid:
            raise Rejected(403, f"pod {pod.name} of this token is gone")
        return pod.uid, reporting_pod_of(body)

    def _remember(self, key: str, result: _ReviewResult) -> None:
        if result.pod in self._deleted_pods:
            return
        self._forget(result.pod)
        self._results[key], self._tokens[result.pod] = result, key
        if len(self._results) > _REMEMBERED:
            self._forget(next(iter(self._results.values())).pod)

    def _forget(self, pod: str) -> None:
        if key := self._tokens.pop(pod, None):
            del self._results[key]


def _remember_newest(newest: OrderedDict[str, Any], key: str, value: object) -> None:
    newest[key] = value
    newest.move_to_end(key)
    if len(newest) > _REMEMBERED:
        newest.popitem(last=False)


def _claims_of(token: str) -> Json:
    """Return the unverified claims of a token; empty if they cannot be read."""
    try:
        _, claims, _ = token[:_MOST_CLAIMS].split(".")
        found = json.loads(urlsafe_b64decode(claims + "=" * (-len(claims) % 4)))
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _namespace_of(claims: Json) -> str:
    """Return the namespace of the service account that a token claims."""
    account = claims.get("sub")
    is_account = isinstance(account, str) and account.startswith(_USER)
    return str(account).removeprefix(_USER).split(":")[0][:_MOST_NAMESPACE] if is_account else _NO_NAMESPACE


def _is_still(reporter: ReportingPod, body: Json) -> bool:
    try:
        return reporting_pod_of(body) == reporter
    except Rejected:
        return False


def pod_of_review(review: Json) -> TokenPod:
    """Return the pod that a TokenReview names. Raises Rejected."""
    status = review.get("status", {})
    if not status.get("authenticated") or REPORT_AUDIENCE not in (status.get("audiences") or []):
        raise Rejected(401, f"the token is not valid, or not for audience {REPORT_AUDIENCE}")
    user = status.get("user", {})
    extra = user.get("extra") or {}
    name, uid = (next(iter(extra.get(key) or []), "") for key in (_POD_NAME, _POD_UID))
    account = user.get("username", "")
    if not account.startswith(_USER) or not name or not uid:
        raise Rejected(403, "only pods report, with the token that was projected into them")
    return TokenPod(account.removeprefix(_USER).split(":")[0], name, uid)


def reporting_pod_of(body: Json) -> ReportingPod:
    """Return the reporting pod as its labels describe it. Raises Rejected for a pod that trains nothing."""
    metadata = body["metadata"]
    rejection = Rejected(403, f"pod {metadata['name']} trains no PseudoRealJob")
    try:
        job, pod = metadata["labels"][LABEL_JOB_UID], read_pod(body)
    except (KeyError, ValueError):
        raise rejection from None
    if pod.execution.kind is not StageKind.TRAIN:
        raise rejection
    return ReportingPod((metadata["namespace"], job), pod.execution, pod.index, pod.name)


def _token_review(token: str) -> Json:
    return {
        "apiVersion": "authentication.k8s.io/v1",
        "kind": "TokenReview",
        "spec": {"token": token, "audiences": [REPORT_AUDIENCE]},
    }

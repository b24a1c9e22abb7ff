"""Owner of a token, and the number of requests to the API server."""

import copy
import json
from base64 import urlsafe_b64encode
from contextlib import suppress
from typing import Any

import pytest
from kubernetes.aio.client import ApiException
from pseudoreal_operator.endpoint import identity
from pseudoreal_operator.endpoint.identity import Identities, Rejected, TokenPod, pod_of_review, reporting_pod_of
from pseudoreal_operator.endpoint.limits import Limiter
from pseudoreal_operator.observe.report_store import ReportingPod
from pseudoreal_operator.observe.stages import Execution, StageKind

from tests.unit.operator.endpoint.support.clock import HandClock
from tests.unit.operator.endpoint.support.fake_api import FakeApi, pod_body, review_of

REPORTER = ReportingPod(("default", "job-uid"), Execution("pseudo", StageKind.TRAIN, 1), 0, "j-pseudo-e1-0")


@pytest.fixture
def identities(api: FakeApi, clock: HandClock) -> Identities:
    return Identities(api, (), clock)


async def get_rejection(identities: Identities, token: str, address: str = "10.0.0.1") -> Rejected:
    with pytest.raises(Rejected) as caught:
        await identities.authenticate(token, address)
    return caught.value


def with_change(path: tuple[str, ...], value: Any) -> dict[str, Any]:
    """Return a valid review with one field changed; None removes the field."""
    status = copy.deepcopy(review_of())
    place = status
    for key in path[:-1]:
        place = place[key]
    if value is None:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return {"status": status}


def token_with_claims(subject: Any, salt: object = "", exp: Any = None) -> str:
    """Return a token with claims; tokens with different salts differ."""
    claims = {"sub": subject, "jti": str(salt)} | ({} if exp is None else {"exp": exp})
    return f"e30.{urlsafe_b64encode(json.dumps(claims).encode()).decode().rstrip('=')}.c2ln"


def test_token_review_names_the_pod() -> None:
    assert pod_of_review({"status": review_of()}) == TokenPod("default", "j-pseudo-e1-0", "pod-uid")


@pytest.mark.parametrize(
    ("review", "status", "says"),
    [
        ({}, 401, "not valid"),
        ({"status": {"authenticated": False, "error": "expired"}}, 401, "not valid"),
        (with_change(("authenticated",), False), 401, "not valid"),
        (with_change(("audiences",), ["https://kubernetes.default.svc"]), 401, "audience operator.pseudoreal.dev"),
        # An API server that ignores the question about audiences answers without them.
        (with_change(("audiences",), None), 401, "audience"),
        (with_change(("audiences",), []), 401, "audience"),
        (with_change(("user", "username"), "alice"), 403, "only pods"),
        (with_change(("user", "username"), "system:node:n1"), 403, "only pods"),
        (with_change(("user", "extra"), None), 403, "only pods"),
        (with_change(("user", "extra", "authentication.kubernetes.io/pod-name"), None), 403, "only pods"),
        (with_change(("user", "extra", "authentication.kubernetes.io/pod-uid"), []), 403, "only pods"),
    ],
)
def test_token_reviews_of_other_users_and_audiences_are_rejected(
    review: dict[str, Any], status: int, says: str
) -> None:
    with pytest.raises(Rejected, match=says) as caught:
        pod_of_review(review)
    assert caught.value.status == status


def test_reporting_pod_follows_from_the_pods_labels() -> None:
    body = pod_body(index=3, **{"phase": "real", "execution": "7"})
    name, execution = body["metadata"]["name"], Execution("real", StageKind.TRAIN, 7)
    assert reporting_pod_of(body) == ReportingPod(("default", "job-uid"), execution, 3, name)


@pytest.mark.parametrize("missing", ["job-uid", "phase", "stage", "execution"])
def test_pod_that_lacks_a_label_is_rejected(missing: str) -> None:
    body = pod_body()
    del body["metadata"]["labels"][f"pseudoreal.dev/{missing}"]
    with pytest.raises(Rejected, match="trains no PseudoRealJob"):
        reporting_pod_of(body)


@pytest.mark.parametrize("wrong", [{"stage": "delink"}, {"stage": "king"}, {"execution": "first"}])
def test_pod_of_another_stage_is_rejected(wrong: dict[str, Any]) -> None:
    with pytest.raises(Rejected, match="trains no PseudoRealJob") as caught:
        reporting_pod_of(pod_body(**wrong))
    assert caught.value.status == 403


def test_pod_without_labels_is_rejected() -> None:
    with pytest.raises(Rejected, match="trains no PseudoRealJob"):
        reporting_pod_of({"metadata": {"name": "p", "namespace": "default", "uid": "u"}})


async def test_token_is_reviewed_once_within_its_lifetime(
    identities: Identities, api: FakeApi, clock: HandClock
) -> None:
    for _ in range(720):
        assert await identities.authenticate("good", "10.0.0.1") == REPORTER
        clock.now += 5
    assert api.reviews == 1
    assert await identities.authenticate("good", "10.0.0.1") == REPORTER
    assert api.reviews == 2


async def test_token_of_a_deleted_pod_is_rejected_after_the_watch_event(identities: Identities, api: FakeApi) -> None:
    await identities.authenticate("good", "10.0.0.1")
    identities.pod_changed("MODIFIED", pod_body())
    body = api.pods.pop("j-pseudo-e1-0")
    assert await identities.authenticate("good", "10.0.0.1") == REPORTER
    identities.pod_changed("DELETED", body)
    rejected = await get_rejection(identities, "good")
    assert (rejected.status, str(rejected)) == (403, "pod j-pseudo-e1-0 of this token is gone")


async def test_pod_deleted_during_its_review_is_not_remembered(identities: Identities, api: FakeApi) -> None:
    identities.pod_changed("DELETED", pod_body())
    await identities.authenticate("good", "10.0.0.1")
    api.pods.clear()
    assert (await get_rejection(identities, "good")).status == 403


async def test_pod_whose_labels_change_reports_for_another_job(identities: Identities, api: FakeApi) -> None:
    await identities.authenticate("good", "10.0.0.1")
    for labels, expected in (({"job-uid": "other"}, ("default", "other")), ({"phase": "real"}, REPORTER.job)):
        changed: Any = labels
        body = api.pods["j-pseudo-e1-0"] = pod_body(**changed)
        identities.pod_changed("MODIFIED", body)
        reporter = await identities.authenticate("good", "10.0.0.1")
        assert (reporter.job, reporter.execution.phase) == (expected, labels.get("phase", "pseudo"))
    identities.pod_changed("MODIFIED", pod_body(stage="king"))
    reviews = api.reviews
    await identities.authenticate("good", "10.0.0.1")
    assert api.reviews == reviews + 1


async def test_missed_watch_events_cause_all_tokens_to_be_reviewed_again(identities: Identities, api: FakeApi) -> None:
    await identities.authenticate("good", "10.0.0.1")
    identities.changes_missed()
    await identities.authenticate("good", "10.0.0.1")
    assert api.reviews == 2


async def test_one_token_per_pod_is_remembered(identities: Identities, api: FakeApi) -> None:
    api.add("newer")
    for token in ("good", "newer", "newer", "good"):
        await identities.authenticate(token, "10.0.0.1")
    assert api.reviews == 3


async def test_pod_of_the_same_name_with_another_uid_is_rejected(identities: Identities, api: FakeApi) -> None:
    api.pods["j-pseudo-e1-0"]["metadata"]["uid"] = "another"
    assert (await get_rejection(identities, "good")).status == 403


async def test_rejection_is_remembered_for_a_while(identities: Identities, api: FakeApi, clock: HandClock) -> None:
    assert (await get_rejection(identities, "late")).status == 401
    api.add("late")
    rejected = await get_rejection(identities, "late", "10.0.0.7")
    assert (rejected.status, api.reviews) == (401, 1)
    clock.now += identity.REJECTION_SECONDS
    assert await identities.authenticate("late", "10.0.0.1") == REPORTER


async def test_remembered_rejections_are_bounded(identities: Identities, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "_REMEMBERED", 3)
    for number in range(9):
        await get_rejection(identities, f"wrong-{number}", f"10.0.1.{number}")
    assert (len(identities._rejected), len(identities._suspects)) == (3, 3)


async def test_token_of_an_unwatched_namespace_is_rejected(api: FakeApi, clock: HandClock) -> None:
    identities = Identities(api, ("teams", "research"), clock)
    rejected = await get_rejection(identities, "good")
    assert (rejected.status, str(rejected)) == (403, "this operator does not watch namespace default")
    api.add("theirs", namespace="teams")
    assert (await identities.authenticate("theirs", "10.0.0.1")).job == ("teams", "job-uid")


async def test_flood_of_wrong_tokens_silences_only_its_own_address(
    identities: Identities, api: FakeApi, clock: HandClock
) -> None:
    statuses = [(await get_rejection(identities, f"wrong-{n}")).status for n in range(identity.REJECTIONS_AT_ONCE + 10)]
    assert statuses == [401] * identity.REJECTIONS_AT_ONCE + [429] * 10
    assert api.reviews == identity.REJECTIONS_AT_ONCE
    assert (await get_rejection(identities, "good")).status == 429
    assert await identities.authenticate("good", "10.0.0.2") == REPORTER
    clock.now += 1
    assert (await get_rejection(identities, "wrong")).status == 401
    assert (await get_rejection(identities, "wronger")).status == 429


async def test_many_valid_pods_may_share_an_address(identities: Identities, api: FakeApi) -> None:
    pods = identity.REJECTIONS_AT_ONCE + 10
    for number in range(pods):
        api.add(f"good-{number}", name=f"j-pseudo-e1-{number}", uid=f"pod-{number}", index=number)
    reporters = {await identities.authenticate(f"good-{number}", "10.0.0.1") for number in range(pods)}
    assert len(reporters) == pods


async def test_token_reviews_of_all_callers_together_are_limited(identities: Identities, api: FakeApi) -> None:
    tokens = [token_with_claims(f"system:serviceaccount:team-{n}:default", salt=n) for n in range(250)]
    statuses = [(await get_rejection(identities, token, f"10.0.1.{n}")).status for n, token in enumerate(tokens)]
    assert statuses.count(429) == 50
    assert api.reviews == identity.REVIEWS_AT_ONCE


async def test_flood_of_one_namespace_leaves_reviews_for_the_others(
    identities: Identities, api: FakeApi, clock: HandClock
) -> None:
    """The namespace has many pods with valid tokens."""

    async def flood(numbers: range) -> int:
        """Return how many of these pods get a review."""
        before = api.reviews
        for number in numbers:
            token = token_with_claims("system:serviceaccount:flood:default", salt=number)
            api.add(token, name=f"p-{number}", uid=f"p-{number}", namespace="flood")
            with suppress(Rejected):
                await identities.authenticate(token, f"10.0.{number}.1")
        return api.reviews - before

    assert await flood(range(250)) == identity.REVIEWS_AT_ONCE / 2
    honest = token_with_claims("system:serviceaccount:default:default")
    api.add(honest)
    assert await identities.authenticate(honest, "10.1.0.1") == REPORTER
    clock.now += 1
    assert await flood(range(250, 400)) > identity.SHARE_PER_SECOND, "whoever asks has what nobody else needs"
    assert identities._reviews.left("all") > identity.REVIEWS_AT_ONCE / 2 - identity.SHARE_PER_SECOND - 1


async def test_forged_tokens_of_a_namespace_take_no_reviews_from_it(identities: Identities, api: FakeApi) -> None:
    """Each of a hundred addresses makes one attempt before its tokens are doubted, and more afterwards."""
    for salt in range(500):
        token = token_with_claims("system:serviceaccount:default:default", salt=salt)
        await get_rejection(identities, token, f"10.0.{salt % 100}.1")
    share = identities._shares.left("default")
    assert share == identity.SHARE_AT_ONCE
    honest = token_with_claims("system:serviceaccount:default:default", salt="honest")
    api.add(honest)
    assert await identities.authenticate(honest, "10.1.0.1") == REPORTER


async def test_addresses_of_one_network_share_a_limit_on_rejections(identities: Identities) -> None:
    flood = identity.REJECTIONS_AT_ONCE * identity.NETWORK_FACTOR
    identities._reviews = identities._shares = Limiter(1e6, 1e6, HandClock())
    statuses = [(await get_rejection(identities, f"wrong-{n}", f"2001:db8::{n:x}")).status for n in range(flood + 10)]
    assert statuses == [401] * flood + [429] * 10


@pytest.mark.parametrize(
    ("expires_in", "believed"),
    [(600, 600), (7200, 3600), (-30, identity.LEAST_RESULT_SECONDS), ("soon", 3600), (10**300, 3600), (None, 3600)],
)
async def test_review_result_is_used_until_the_token_expires(
    api: FakeApi, clock: HandClock, expires_in: Any, believed: float
) -> None:
    identities = Identities(api, (), clock, wall=lambda: 2_000_000_000.0)
    expires = 2_000_000_000 + expires_in if isinstance(expires_in, int) else expires_in
    token = token_with_claims("system:serviceaccount:default:default", exp=expires)
    api.add(token)
    for seconds, reviews in ((0, 1), (believed - 1, 1), (1, 2)):
        clock.now += seconds
        assert await identities.authenticate(token, "10.0.0.1") == REPORTER
        assert api.reviews == reviews


@pytest.mark.parametrize(
    "claims", ["[" * 6000, "{" * 6000, "1" * 6000, "[]", "null", '{"sub": 1}', '{"sub": null}', "\xff", ""]
)
async def test_malformed_claims_are_rejected_with_401(identities: Identities, claims: str) -> None:
    token = f"a.{urlsafe_b64encode(claims.encode()).decode()}.b"
    assert (await get_rejection(identities, token)).status == 401
    for odd in (token[:-3], f"{token}.c", "a.é.b", "..", "."):
        assert (await get_rejection(identities, odd)).status == 401


async def test_known_token_is_accepted_during_a_flood(identities: Identities) -> None:
    await identities.authenticate("good", "10.0.0.1")
    for number in range(300):
        await get_rejection(identities, f"wrong-{number}", f"10.0.1.{number}")
    assert await identities.authenticate("good", "10.0.0.1") == REPORTER


async def test_failed_review_is_no_rejection_and_is_repeated(identities: Identities, api: FakeApi) -> None:
    for failure in (ApiException(status=500), OSError("unreachable")):
        api.failure = failure
        with pytest.raises(type(failure)):
            await identities.authenticate("good", "10.0.0.1")
    api.failure = None
    assert await identities.authenticate("good", "10.0.0.1") == REPORTER


async def test_oldest_token_is_forgotten_when_there_are_too_many(
    identities: Identities, api: FakeApi, clock: HandClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(identity, "_REMEMBERED", 2)
    for token in ("a", "b"):
        api.add(token, name=token, uid=token)
        await identities.authenticate(token, "10.0.0.1")
    clock.now += identity.RESULT_SECONDS
    await identities.authenticate("a", "10.0.0.1")
    await identities.authenticate("good", "10.0.0.1")
    assert api.reviews == 4
    await identities.authenticate("a", "10.0.0.1")
    assert api.reviews == 4, "it was reviewed after b"

"""Owner of a token, and the number of requests to the API server."""

import copy
import json
from base64 import urlsafe_b64encode
from contextlib import suppress
from typing import Any

import pytest
from kubernetes.aio.client import ApiException
from pseudoreal_operator.endpoint import identity
from pseudoreal_operator.endpoint.identity import Identities, Refused, TokenPod, pod_of_review, reporting_pod_of
from pseudoreal_operator.endpoint.limits import Limiter
from pseudoreal_operator.observe.report_store import ReportingPod
from pseudoreal_operator.observe.stages import Execution, StageKind

from tests.unit.operator.endpoint.support.clock import HandClock
from tests.unit.operator.endpoint.support.fake_api import FakeApi, pod_body, review_of

REPORTER = ReportingPod(("default", "job-uid"), Execution("pseudo", StageKind.TRAIN, 1), 0, "j-pseudo-e1-0")


@pytest.fixture
def identities(api: FakeApi, clock: HandClock) -> Identities:
    return Identities(api, (), clock)


async def refusal(identities: Identities, token: str, address: str = "10.0.0.1") -> Refused:
    with pytest.raises(Refused) as caught:
        await identities.of(token, address)
    return caught.value


def changed(path: tuple[str, ...], value: Any) -> dict[str, Any]:
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


def claiming(subject: Any, salt: object = "", exp: Any = None) -> str:
    """Return a token with claims; tokens with different salts differ."""
    claims = {"sub": subject, "jti": str(salt)} | ({} if exp is None else {"exp": exp})
    return f"e30.{urlsafe_b64encode(json.dumps(claims).encode()).decode().rstrip('=')}.c2ln"


def test_the_pod_of_a_review() -> None:
    assert pod_of_review({"status": review_of()}) == TokenPod("default", "j-pseudo-e1-0", "pod-uid")


@pytest.mark.parametrize(
    ("review", "status", "says"),
    [
        ({}, 401, "not valid"),
        ({"status": {"authenticated": False, "error": "expired"}}, 401, "not valid"),
        (changed(("authenticated",), False), 401, "not valid"),
        (changed(("audiences",), ["https://kubernetes.default.svc"]), 401, "audience operator.pseudoreal.dev"),
        # An API server that ignores the question about audiences answers without them.
        (changed(("audiences",), None), 401, "audience"),
        (changed(("audiences",), []), 401, "audience"),
        (changed(("user", "username"), "alice"), 403, "only pods"),
        (changed(("user", "username"), "system:node:n1"), 403, "only pods"),
        (changed(("user", "extra"), None), 403, "only pods"),
        (changed(("user", "extra", "authentication.kubernetes.io/pod-name"), None), 403, "only pods"),
        (changed(("user", "extra", "authentication.kubernetes.io/pod-uid"), []), 403, "only pods"),
    ],
)
def test_reviews_that_are_refused(review: dict[str, Any], status: int, says: str) -> None:
    with pytest.raises(Refused, match=says) as caught:
        pod_of_review(review)
    assert caught.value.status == status


def test_the_speaker_is_what_the_labels_say() -> None:
    body = pod_body(index=3, **{"phase": "real", "execution": "7"})
    name, execution = body["metadata"]["name"], Execution("real", StageKind.TRAIN, 7)
    assert reporting_pod_of(body) == ReportingPod(("default", "job-uid"), execution, 3, name)


@pytest.mark.parametrize("missing", ["job-uid", "phase", "stage", "execution"])
def test_a_pod_without_one_of_our_labels_is_a_stranger(missing: str) -> None:
    body = pod_body()
    del body["metadata"]["labels"][f"pseudoreal.dev/{missing}"]
    with pytest.raises(Refused, match="trains no PseudoRealJob"):
        reporting_pod_of(body)


@pytest.mark.parametrize("wrong", [{"stage": "delink"}, {"stage": "king"}, {"execution": "first"}])
def test_a_pod_that_does_not_train_is_a_stranger(wrong: dict[str, Any]) -> None:
    with pytest.raises(Refused, match="trains no PseudoRealJob") as caught:
        reporting_pod_of(pod_body(**wrong))
    assert caught.value.status == 403


def test_a_pod_without_labels_is_a_stranger() -> None:
    with pytest.raises(Refused, match="trains no PseudoRealJob"):
        reporting_pod_of({"metadata": {"name": "p", "namespace": "default", "uid": "u"}})


async def test_a_token_is_reviewed_once_in_its_life(identities: Identities, api: FakeApi, clock: HandClock) -> None:
    for _ in range(720):
        assert await identities.of("good", "10.0.0.1") == REPORTER
        clock.now += 5
    assert api.reviews == 1
    assert await identities.of("good", "10.0.0.1") == REPORTER
    assert api.reviews == 2


async def test_a_pod_that_is_deleted_is_refused_as_soon_as_its_watch_tells(
    identities: Identities, api: FakeApi
) -> None:
    await identities.of("good", "10.0.0.1")
    identities.pod_changed("MODIFIED", pod_body())
    body = api.pods.pop("j-pseudo-e1-0")
    assert await identities.of("good", "10.0.0.1") == REPORTER
    identities.pod_changed("DELETED", body)
    refused = await refusal(identities, "good")
    assert (refused.status, str(refused)) == (403, "pod j-pseudo-e1-0 of this token is gone")


async def test_a_pod_that_is_deleted_while_its_token_is_reviewed_is_not_believed_later(
    identities: Identities, api: FakeApi
) -> None:
    identities.pod_changed("DELETED", pod_body())
    await identities.of("good", "10.0.0.1")
    api.pods.clear()
    assert (await refusal(identities, "good")).status == 403


async def test_a_pod_whose_labels_change_speaks_for_somebody_else(identities: Identities, api: FakeApi) -> None:
    await identities.of("good", "10.0.0.1")
    for labels, expected in (({"job-uid": "other"}, ("default", "other")), ({"phase": "real"}, REPORTER.job)):
        changed: Any = labels
        body = api.pods["j-pseudo-e1-0"] = pod_body(**changed)
        identities.pod_changed("MODIFIED", body)
        reporter = await identities.of("good", "10.0.0.1")
        assert (reporter.job, reporter.execution.phase) == (expected, labels.get("phase", "pseudo"))
    identities.pod_changed("MODIFIED", pod_body(stage="king"))
    reviews = api.reviews
    await identities.of("good", "10.0.0.1")
    assert api.reviews == reviews + 1


async def test_after_a_gap_of_the_watch_all_tokens_are_reviewed_anew(identities: Identities, api: FakeApi) -> None:
    await identities.of("good", "10.0.0.1")
    identities.changes_missed()
    await identities.of("good", "10.0.0.1")
    assert api.reviews == 2


async def test_of_a_pod_one_token_is_remembered(identities: Identities, api: FakeApi) -> None:
    api.add("newer")
    for token in ("good", "newer", "newer", "good"):
        await identities.of(token, "10.0.0.1")
    assert api.reviews == 3


async def test_a_pod_of_the_same_name_is_another_pod(identities: Identities, api: FakeApi) -> None:
    api.pods["j-pseudo-e1-0"]["metadata"]["uid"] = "another"
    assert (await refusal(identities, "good")).status == 403


async def test_a_refusal_is_remembered_for_a_while(identities: Identities, api: FakeApi, clock: HandClock) -> None:
    assert (await refusal(identities, "late")).status == 401
    api.add("late")
    refused = await refusal(identities, "late", "10.0.0.7")
    assert (refused.status, api.reviews) == (401, 1)
    clock.now += identity.DENIED_SECONDS
    assert await identities.of("late", "10.0.0.1") == REPORTER


async def test_of_refusals_no_more_are_remembered_than_fit(
    identities: Identities, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(identity, "_REMEMBERED", 3)
    for number in range(9):
        await refusal(identities, f"wrong-{number}", f"10.0.1.{number}")
    assert (len(identities._denied), len(identities._doubted)) == (3, 3)


async def test_a_namespace_that_is_not_watched(api: FakeApi, clock: HandClock) -> None:
    identities = Identities(api, ("teams", "research"), clock)
    refused = await refusal(identities, "good")
    assert (refused.status, str(refused)) == (403, "this operator does not watch namespace default")
    api.add("theirs", namespace="teams")
    assert (await identities.of("theirs", "10.0.0.1")).job == ("teams", "job-uid")


async def test_who_floods_the_operator_with_wrong_tokens_silences_only_himself(
    identities: Identities, api: FakeApi, clock: HandClock
) -> None:
    statuses = [(await refusal(identities, f"wrong-{n}")).status for n in range(identity.REFUSALS_AT_ONCE + 10)]
    assert statuses == [401] * identity.REFUSALS_AT_ONCE + [429] * 10
    assert api.reviews == identity.REFUSALS_AT_ONCE
    assert (await refusal(identities, "good")).status == 429
    assert await identities.of("good", "10.0.0.2") == REPORTER
    clock.now += 1
    assert (await refusal(identities, "wrong")).status == 401
    assert (await refusal(identities, "wronger")).status == 429


async def test_many_good_pods_may_share_an_address(identities: Identities, api: FakeApi) -> None:
    pods = identity.REFUSALS_AT_ONCE + 10
    for number in range(pods):
        api.add(f"good-{number}", name=f"j-pseudo-e1-{number}", uid=f"pod-{number}", index=number)
    reporters = {await identities.of(f"good-{number}", "10.0.0.1") for number in range(pods)}
    assert len(reporters) == pods


async def test_the_api_server_is_spared_whoever_asks(identities: Identities, api: FakeApi) -> None:
    tokens = [claiming(f"system:serviceaccount:team-{n}:default", salt=n) for n in range(250)]
    statuses = [(await refusal(identities, token, f"10.0.1.{n}")).status for n, token in enumerate(tokens)]
    assert statuses.count(429) == 50
    assert api.reviews == identity.REVIEWS_AT_ONCE


async def test_a_flood_of_one_namespace_leaves_reviews_for_the_others(
    identities: Identities, api: FakeApi, clock: HandClock
) -> None:
    """The namespace has many pods with valid tokens."""

    async def flood(numbers: range) -> int:
        """Return how many of these pods get a review."""
        before = api.reviews
        for number in numbers:
            token = claiming("system:serviceaccount:flood:default", salt=number)
            api.add(token, name=f"p-{number}", uid=f"p-{number}", namespace="flood")
            with suppress(Refused):
                await identities.of(token, f"10.0.{number}.1")
        return api.reviews - before

    assert await flood(range(250)) == identity.REVIEWS_AT_ONCE / 2
    honest = claiming("system:serviceaccount:default:default")
    api.add(honest)
    assert await identities.of(honest, "10.1.0.1") == REPORTER
    clock.now += 1
    assert await flood(range(250, 400)) > identity.SHARE_PER_SECOND, "whoever asks has what nobody else needs"
    assert identities._reviews.left("all") > identity.REVIEWS_AT_ONCE / 2 - identity.SHARE_PER_SECOND - 1


async def test_who_forges_tokens_of_a_namespace_takes_no_reviews_from_it(identities: Identities, api: FakeApi) -> None:
    """Each of a hundred addresses makes one attempt before its tokens are doubted, and more afterwards."""
    for salt in range(500):
        token = claiming("system:serviceaccount:default:default", salt=salt)
        await refusal(identities, token, f"10.0.{salt % 100}.1")
    share = identities._shares.left("default")
    assert share == identity.SHARE_AT_ONCE
    honest = claiming("system:serviceaccount:default:default", salt="honest")
    api.add(honest)
    assert await identities.of(honest, "10.1.0.1") == REPORTER


async def test_addresses_of_one_network_have_their_refusals_together(identities: Identities) -> None:
    flood = identity.REFUSALS_AT_ONCE * identity.NETWORK_FACTOR
    identities._reviews = identities._shares = Limiter(1e6, 1e6, HandClock())
    statuses = [(await refusal(identities, f"wrong-{n}", f"2001:db8::{n:x}")).status for n in range(flood + 10)]
    assert statuses == [401] * flood + [429] * 10


@pytest.mark.parametrize(
    ("expires_in", "believed"),
    [(600, 600), (7200, 3600), (-30, identity.LEAST_BELIEVED_SECONDS), ("soon", 3600), (10**300, 3600), (None, 3600)],
)
async def test_a_review_is_believed_until_its_token_expires(
    api: FakeApi, clock: HandClock, expires_in: Any, believed: float
) -> None:
    identities = Identities(api, (), clock, wall=lambda: 2_000_000_000.0)
    expires = 2_000_000_000 + expires_in if isinstance(expires_in, int) else expires_in
    token = claiming("system:serviceaccount:default:default", exp=expires)
    api.add(token)
    for seconds, reviews in ((0, 1), (believed - 1, 1), (1, 2)):
        clock.now += seconds
        assert await identities.of(token, "10.0.0.1") == REPORTER
        assert api.reviews == reviews


@pytest.mark.parametrize(
    "claims", ["[" * 6000, "{" * 6000, "1" * 6000, "[]", "null", '{"sub": 1}', '{"sub": null}', "\xff", ""]
)
async def test_claims_may_be_anything(identities: Identities, claims: str) -> None:
    token = f"a.{urlsafe_b64encode(claims.encode()).decode()}.b"
    assert (await refusal(identities, token)).status == 401
    for odd in (token[:-3], f"{token}.c", "a.é.b", "..", "."):
        assert (await refusal(identities, odd)).status == 401


async def test_a_known_token_is_heard_in_a_flood(identities: Identities) -> None:
    await identities.of("good", "10.0.0.1")
    for number in range(300):
        await refusal(identities, f"wrong-{number}", f"10.0.1.{number}")
    assert await identities.of("good", "10.0.0.1") == REPORTER


async def test_an_api_server_that_fails_is_no_refusal_and_is_asked_again(identities: Identities, api: FakeApi) -> None:
    for failure in (ApiException(status=500), OSError("unreachable")):
        api.failure = failure
        with pytest.raises(type(failure)):
            await identities.of("good", "10.0.0.1")
    api.failure = None
    assert await identities.of("good", "10.0.0.1") == REPORTER


async def test_the_oldest_token_is_forgotten_when_there_are_too_many(
    identities: Identities, api: FakeApi, clock: HandClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(identity, "_REMEMBERED", 2)
    for token in ("a", "b"):
        api.add(token, name=token, uid=token)
        await identities.of(token, "10.0.0.1")
    clock.now += identity.BELIEVED_SECONDS
    await identities.of("a", "10.0.0.1")
    await identities.of("good", "10.0.0.1")
    assert api.reviews == 4
    await identities.of("a", "10.0.0.1")
    assert api.reviews == 4, "it was reviewed after b"

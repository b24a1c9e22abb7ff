"""Answers of the API server that are errors."""

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, cast

import pytest
from aiohttp import ClientPayloadError
from kubernetes.aio.client import ApiClient, ApiException
from pseudoreal_operator.cluster.api import Api, kind_of, message_of
from pseudoreal_operator.metrics.registry import REGISTRY

EVENT = {"kind": "Event", "metadata": {"name": "e", "namespace": "default"}}


@dataclass
class Answer:
    """A fake answer of the client; it is its own response and its own content as well."""

    status: int
    body: str
    reason: str = "said so"

    @property
    def response(self) -> "Answer":
        return self

    @property
    def content(self) -> "Answer":
        return self

    async def __aenter__(self) -> "Answer":
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def iter_any(self) -> AsyncIterator[bytes]:
        yield self.body.encode()


def _make_api(status: int | OSError, body: object) -> Api:
    class Client:
        async def param_serialize(self, *_: Any, **__: Any) -> tuple[()]:
            return ()

        async def call_api(self, **_: Any) -> Answer:
            if isinstance(status, OSError):
                raise status
            return Answer(status, body if isinstance(body, str) else json.dumps(body))

    return Api(cast(ApiClient, Client()))


async def test_pod_group_requests_go_to_the_api_group_of_its_scheduler() -> None:
    paths: list[str] = []

    class Client:
        async def param_serialize(self, resource_path: str, **_: Any) -> tuple[()]:
            paths.append(resource_path)
            return ()

        async def call_api(self, **_: Any) -> Answer:
            return Answer(200, "{}")

    api = Api(cast(ApiClient, Client()))
    for version in ("scheduling.k8s.io/v1beta1", "scheduling.x-k8s.io/v1alpha1"):
        group = {"kind": "PodGroup", "apiVersion": version, "metadata": {"name": "g", "namespace": "n"}}
        await api.create(group)
        await api.find(kind_of(group), "n", "g")
        assert paths[-2:] == [f"/apis/{version}/namespaces/n/podgroups", f"/apis/{version}/namespaces/n/podgroups/g"]


async def test_present_version_is_read_and_never_taken_from_an_answer_that_is_no_list() -> None:
    assert await _make_api(200, {"metadata": {"resourceVersion": "9"}, "items": []}).version("Pod", None, "a") == "9"
    with pytest.raises(ClientPayloadError):
        await _make_api(200, "<html>").version("Pod", None, "a")


async def test_posting_an_existing_object_is_no_error() -> None:
    await _make_api(201, {}).post(EVENT)
    await _make_api(409, {"reason": "AlreadyExists"}).post(EVENT)


@pytest.mark.parametrize("body", [{"reason": "Conflict"}, "try again", "[]"])
async def test_posting_raises_conflicts_other_than_already_exists(body: object) -> None:
    with pytest.raises(ApiException):
        await _make_api(409, body).post(EVENT)


async def test_requests_are_counted_by_status_code() -> None:
    def count_of(code: str) -> float:
        labels = {"verb": "POST", "code": code}
        return REGISTRY.get_sample_value("pseudoreal_api_requests_total", labels) or 0.0

    before = [count_of(code) for code in ("201", "409", "none")]
    await _make_api(201, {}).post(EVENT)
    with pytest.raises(ApiException):
        await _make_api(409, {}).post(EVENT)
    with pytest.raises(OSError, match="down"):
        await _make_api(OSError("down"), {}).post(EVENT)
    assert [count_of(code) for code in ("201", "409", "none")] == [number + 1 for number in before]


@pytest.mark.parametrize(
    ("body", "says"), [({"message": "no"}, "no"), ("<html>", "502 said so"), ("[]", "502 said so")]
)
async def test_message_of_an_error_is_the_api_servers_or_else_the_clients(body: object, says: str) -> None:
    with pytest.raises(ApiException) as caught:
        await _make_api(502, body).find("Job", "default", "j")
    assert message_of(caught.value) == says

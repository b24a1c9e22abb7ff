"""A pass meets a job that is not the one, or not as, it was read."""

from typing import Any, cast

import pytest
from kubernetes.aio.client import ApiException
from pseudoreal_operator.cluster.api import Api, Json
from pseudoreal_operator.controller.reconcile import Gone, Identity, reconcile
from pseudoreal_operator.observe.board import Board
from pseudoreal_operator.settings import Settings

from tests.jobs import good_job

SETTINGS = Settings("trainer:1", "IfNotPresent", ())


class Server:
    """One job, and what is posted and applied. Writing its status fails with the given code."""

    def __init__(self, uid: str, refusal: int | None = None) -> None:
        self._body = good_job()
        self._body["metadata"] |= {"namespace": "default", "uid": uid, "resourceVersion": "7", "generation": 1}
        self._refusal = refusal
        self.posted: list[Json] = []
        self.applied: list[Json] = []

    async def find(self, *_: str) -> Json:
        return self._body

    async def list(self, *_: str) -> list[Json]:
        return []

    async def post(self, manifest: Json) -> None:
        self.posted.append(manifest)

    async def apply(self, manifest: Json, _subresource: str = "") -> None:
        if self._refusal:
            raise ApiException(status=self._refusal, reason="refused")
        self.applied.append(manifest)


async def _pass(server: Any) -> float | None:
    return await reconcile(cast(Api, server), Board(), SETTINGS, Identity("default", "good", "one"))


async def test_another_job_of_the_same_name_is_left_to_its_own_loop() -> None:
    server = Server("another")
    with pytest.raises(Gone):
        await _pass(server)
    assert server.posted == []


async def test_a_status_is_written_only_on_what_was_read() -> None:
    server = Server("one")
    assert await _pass(server) == 0.0
    assert server.applied[0]["metadata"] == {"name": "good", "namespace": "default", "resourceVersion": "7"}


async def test_a_job_that_was_changed_meanwhile_is_looked_at_again_soon() -> None:
    wait = await _pass(Server("one", refusal=409))
    assert wait is not None
    assert 0 < wait < 1


async def test_a_refused_status_is_an_error() -> None:
    with pytest.raises(ApiException):
        await _pass(Server("one", refusal=500))

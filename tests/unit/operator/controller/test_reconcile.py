"""A pass meets a job that is not the one, or not as, it was read."""

import json
from typing import Any, cast

import pytest
from kubernetes.aio.client import ApiException
from pseudoreal_operator.cluster.api import Api, Json
from pseudoreal_operator.controller.counts import Counts
from pseudoreal_operator.controller.reconcile import Gone, Identity, reconcile
from pseudoreal_operator.observe.board import Board
from pseudoreal_operator.settings import Settings

from tests.jobs import good_job

SETTINGS = Settings("trainer:1", "IfNotPresent", ())


class Server:
    """One job, and what is posted and applied. Writing its status fails with the given code."""

    def __init__(
        self,
        uid: str,
        refusal: int | None = None,
        event_refusal: int | None = None,
        child_refusal: ApiException | None = None,
        banned: str | None = None,
    ) -> None:
        """`banned`: a status with that text is refused as invalid."""
        self._banned = banned
        self.attempts: list[Json] = []
        self._body = good_job()
        self._child_refusal = child_refusal
        self._event_refusal = event_refusal
        self._body["metadata"] |= {"namespace": "default", "uid": uid, "resourceVersion": "7", "generation": 1}
        self._refusal = refusal
        self.posted: list[Json] = []
        self.applied: list[Json] = []
        self.created: list[Json] = []

    async def find(self, *_: str) -> Json:
        return self._body

    async def list(self, *_: str) -> list[Json]:
        return []

    async def post(self, manifest: Json) -> None:
        if self._event_refusal:
            raise ApiException(status=self._event_refusal, reason="refused")
        self.posted.append(manifest)

    def remember(self) -> None:
        """The status that was written last."""
        self._body["status"] = self.applied[-1]["status"]

    async def create(self, manifest: Json) -> None:
        if self._child_refusal:
            raise self._child_refusal
        self.created.append(manifest)

    async def apply(self, manifest: Json, _: str) -> None:
        self.attempts.append(manifest)
        if self._refusal:
            raise ApiException(status=self._refusal, reason="refused")
        if self._banned and self._banned in json.dumps(manifest):
            raise ApiException(status=400, reason="error decoding YAML")
        self.applied.append(manifest)


async def _pass(server: Any, counts: Counts | None = None) -> float | None:
    who = Identity("default", "good", "one")
    return await reconcile(cast(Api, server), Board(), SETTINGS, counts or Counts(), who)


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


async def test_a_status_whose_text_is_refused_is_written_without_it() -> None:
    server, counts = Server("one", banned="is about to start"), Counts()
    assert await _pass(server, counts) == 0.0
    (written,) = server.applied
    assert (written["status"]["executionAttempt"], len(server.attempts), counts.refused_statuses) == (1, 2, 1)
    messages = [condition["message"] for condition in written["status"]["conditions"]]
    assert len(messages) == 4
    assert all("refused the text of this condition; the operator's log shows it as text" in m for m in messages)


async def test_a_text_that_was_refused_is_not_tried_again_and_others_are() -> None:
    server, counts = Server("one", banned="The job can run"), Counts()
    await _pass(server, counts)
    server.remember()
    await _pass(server, counts)
    assert counts.refused_statuses == 1
    messages = {c["type"]: c["message"] for c in server.applied[-1]["status"]["conditions"]}
    assert "refused" in messages["Accepted"]
    assert messages["Progressing"] == "Execution 1 at phase pseudo starts."


async def test_a_status_that_is_refused_without_texts_too_is_an_error() -> None:
    server, counts = Server("one", banned="executionAttempt"), Counts()
    with pytest.raises(ApiException):
        await _pass(server, counts)
    assert server.applied == []


async def test_a_namespace_that_takes_no_more_events_does_not_hold_up_its_jobs() -> None:
    server = Server("one", event_refusal=403)
    assert await _pass(server) == 0.0
    assert server.applied[0]["status"]["executionAttempt"] == 1


async def test_an_event_that_may_come_later_is_not_lost() -> None:
    server = Server("one", event_refusal=429)
    with pytest.raises(ApiException):
        await _pass(server)
    assert server.applied == []


@pytest.mark.parametrize(
    ("status", "said", "phase"),
    [
        (422, "spec.template.spec.containers[0].image: Required value", "Failed"),
        (400, 'admission webhook "policy.example" denied the request: no', "Pending"),
        (422, "ValidatingAdmissionPolicy 'no-gpus' denied request", "Pending"),
        (403, "exceeded quota", "Pending"),
    ],
)
async def test_only_an_invalid_child_ends_a_job(status: int, said: str, phase: str) -> None:
    server = Server("one", child_refusal=ApiException(status=status, body=json.dumps({"message": said})))
    await _pass(server)
    server.remember()
    await _pass(server)
    assert server.applied[-1]["status"]["phase"] == phase
    conditions = server.applied[-1]["status"]["conditions"]
    assert any(said in condition["message"] for condition in conditions)

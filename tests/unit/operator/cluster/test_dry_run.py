"""All phases are tried in a dry run before the first one is trained."""

import json
from typing import Any, cast

import pytest
from kubernetes.aio.client import ApiException
from pseudoreal_operator.cluster.api import Api, Json, message_of
from pseudoreal_operator.cluster.creation import dry_run

from tests.unit.operator.support.world import World, make_job


class Server:
    """A fake API server that rejects Jobs of a phase."""

    def __init__(self, phase: str, status: int, reason: str = "Invalid") -> None:
        self._phase, self._status, self._reason = phase, status, reason
        self.tried: list[tuple[str, str]] = []

    async def create(self, manifest: Json, *, dry_run: bool) -> None:
        assert dry_run
        labels = manifest["metadata"]["labels"]
        self.tried.append((labels["pseudoreal.dev/phase"], labels["pseudoreal.dev/stage"]))
        if labels["pseudoreal.dev/phase"] == self._phase:
            body = {"message": "requests: must be at most the limit", "reason": self._reason}
            raise ApiException(status=self._status, body=json.dumps(body))


async def _dry_run(server: Any) -> None:
    await dry_run(cast(Api, server), World(make_job()).plan().dry_run)


async def test_dry_run_covers_every_stage_once() -> None:
    server = Server("none", 422)
    await _dry_run(server)
    assert server.tried == [("pseudo", "train"), ("real", "delink"), ("real", "train")]


@pytest.mark.parametrize("status", [400, 422, 500])
async def test_dry_run_rejection_names_the_phase(status: int) -> None:
    with pytest.raises(ApiException) as caught:
        await _dry_run(Server("real", status))
    assert caught.value.status == status
    assert message_of(caught.value) == "requests: must be at most the limit (phase real)"


@pytest.mark.parametrize(("status", "reason"), [(403, "Forbidden"), (409, "AlreadyExists")])
async def test_dry_run_ignores_quotas_and_taken_names(status: int, reason: str) -> None:
    await _dry_run(Server("pseudo", status, reason))

"""An existing object with the name of a child is used if it belongs to the job, and never changed."""

import base64
import json
from typing import Any, cast

import pytest
from kubernetes.aio.client import ApiException
from pseudoreal_operator.cluster.api import Api, Json
from pseudoreal_operator.cluster.creation import NameConflict, NotServed, create_child

OURS = {"controller": True, "uid": "ours"}


class Server:
    """A fake API server that has one object under every name, or rejects creations."""

    def __init__(self, found: Json | None, reason: str = "AlreadyExists", status: int = 409) -> None:
        self._found, self._reason, self._status = found, reason, status
        self.created: list[Json] = []

    async def create(self, manifest: Json) -> None:
        if self._reason:
            raise ApiException(status=self._status, body=json.dumps({"reason": self._reason}))
        self.created.append(manifest)

    async def find(self, *_: str) -> Json | None:
        return self._found


def child(*owners: Json) -> Json:
    return {"kind": "Job", "metadata": {"name": "j-e1", "namespace": "default", "ownerReferences": list(owners)}}


async def _make(server: Any, manifest: Json) -> None:
    await create_child(cast(Api, server), manifest)


async def test_what_is_not_there_is_made() -> None:
    server = Server(None, reason="")
    await _make(server, child(OURS))
    assert server.created == [child(OURS)]


async def test_what_another_pass_made_is_used() -> None:
    await _make(Server(child({"uid": "somebody"}, OURS)), child(OURS))


@pytest.mark.parametrize("owners", [(), ({"controller": True, "uid": "theirs"},), ({"uid": "ours"},)])
async def test_what_is_another_s_is_named(owners: tuple[Json, ...]) -> None:
    with pytest.raises(NameConflict, match=r"^Job j-e1 in namespace default is not of this job .* delete it"):
        await _make(Server(child(*owners)), child(OURS))


async def test_a_claim_that_stays_is_used_whoever_made_it() -> None:
    await _make(Server(child({"controller": True, "uid": "theirs"})), child())


@pytest.mark.parametrize(("found", "reason"), [(None, "AlreadyExists"), (child(OURS), "Conflict")])
async def test_everything_else_is_for_another_pass(found: Json | None, reason: str) -> None:
    with pytest.raises(ApiException):
        await _make(Server(found, reason), child(OURS))


async def test_pod_groups_that_the_cluster_has_not_are_named() -> None:
    group = child(OURS) | {"kind": "PodGroup", "apiVersion": "scheduling.volcano.sh/v1beta1"}
    with pytest.raises(NotServed, match=r"^The cluster has no PodGroup of scheduling\.volcano\.sh/v1beta1.* install"):
        await _make(Server(None, "NotFound", 404), group)
    with pytest.raises(ApiException):
        await _make(Server(None, "NotFound", 404), child(OURS))


SECRET = child(OURS) | {"kind": "Secret", "type": "Opaque", "immutable": True}


async def test_each_secret_gets_data_of_its_own_when_it_is_made() -> None:
    server = Server(None, reason="")
    await _make(server, SECRET)
    await _make(server, SECRET)
    first, second = (base64.b64decode(made.pop("data")["secret"]) for made in server.created)
    assert (len(first), len(second)) == (32, 32)
    assert first != second
    assert server.created == [SECRET, SECRET]


async def test_a_secret_that_is_there_is_used_and_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator has no permission to read Secrets."""
    server = Server(child({"controller": True, "uid": "theirs"}))
    monkeypatch.delattr(Server, "find")
    await _make(server, SECRET)
    assert server.created == []

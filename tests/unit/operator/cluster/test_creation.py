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


def make_child(*owners: Json) -> Json:
    return {"kind": "Job", "metadata": {"name": "j-e1", "namespace": "default", "ownerReferences": list(owners)}}


async def _create_child(server: Any, manifest: Json) -> None:
    await create_child(cast(Api, server), manifest)


async def test_missing_child_is_created() -> None:
    server = Server(None, reason="")
    await _create_child(server, make_child(OURS))
    assert server.created == [make_child(OURS)]


async def test_child_created_by_another_pass_is_accepted() -> None:
    await _create_child(Server(make_child({"uid": "somebody"}, OURS)), make_child(OURS))


@pytest.mark.parametrize("owners", [(), ({"controller": True, "uid": "theirs"},), ({"uid": "ours"},)])
async def test_object_of_another_owner_raises_a_name_conflict(owners: tuple[Json, ...]) -> None:
    with pytest.raises(NameConflict, match=r"^Job j-e1 in namespace default is not of this job .* delete it"):
        await _create_child(Server(make_child(*owners)), make_child(OURS))


async def test_claim_without_owner_is_used_no_matter_who_created_it() -> None:
    await _create_child(Server(make_child({"controller": True, "uid": "theirs"})), make_child())


@pytest.mark.parametrize(("found", "reason"), [(None, "AlreadyExists"), (make_child(OURS), "Conflict")])
async def test_other_errors_of_a_creation_are_raised_for_another_pass(found: Json | None, reason: str) -> None:
    with pytest.raises(ApiException):
        await _create_child(Server(found, reason), make_child(OURS))


async def test_pod_group_that_the_cluster_does_not_serve_is_named() -> None:
    group = make_child(OURS) | {"kind": "PodGroup", "apiVersion": "scheduling.volcano.sh/v1beta1"}
    with pytest.raises(NotServed, match=r"^The cluster has no PodGroup of scheduling\.volcano\.sh/v1beta1.* install"):
        await _create_child(Server(None, "NotFound", 404), group)
    with pytest.raises(ApiException):
        await _create_child(Server(None, "NotFound", 404), make_child(OURS))


SECRET = make_child(OURS) | {"kind": "Secret", "type": "Opaque", "immutable": True}


async def test_each_created_secret_gets_fresh_random_data() -> None:
    server = Server(None, reason="")
    await _create_child(server, SECRET)
    await _create_child(server, SECRET)
    first, second = (base64.b64decode(made.pop("data")["secret"]) for made in server.created)
    assert (len(first), len(second)) == (32, 32)
    assert first != second
    assert server.created == [SECRET, SECRET]


async def test_existing_secret_is_used_without_being_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator has no permission to read Secrets."""
    server = Server(make_child({"controller": True, "uid": "theirs"}))
    monkeypatch.delattr(Server, "find")
    await _create_child(server, SECRET)
    assert server.created == []

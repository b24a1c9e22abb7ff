"""What of the objects that the API server lists belongs to the job."""

from datetime import UTC, datetime
from typing import Any, cast

from pseudoreal_api.status import PseudoRealJobStatus
from pseudoreal_operator.cluster.api import Api, Json
from pseudoreal_operator.observe.board import Board
from pseudoreal_operator.observe.observed import Observed
from pseudoreal_operator.observe.requests import observe

from tests.unit.operator.world import UID, make_job

CLAIM = {"claim": {"storage": "1Gi", "policy": "Delete"}}


class Server:
    """Whatever is listed, and one claim."""

    def __init__(self, claim: Json | None = None, **listed: list[Json]) -> None:
        self._claim, self._listed = claim, listed

    async def find(self, *_: str) -> Json | None:
        return self._claim

    async def list(self, kind: str, *_: str) -> list[Json]:
        return self._listed.get(kind, [])


async def seen(server: Server) -> Observed:
    job = make_job(spec__checkpoint={"volume": CLAIM})
    return await observe(cast(Api, server), Board(), job, PseudoRealJobStatus(), datetime.now(UTC))


def labelled(name: str, **labels: str) -> dict[str, Any]:
    owners = [{"kind": "PseudoRealJob", "uid": labels.get("job-uid"), "controller": True}]
    named = {f"pseudoreal.dev/{key}": value for key, value in labels.items()}
    return {"metadata": {"name": name, "labels": named, "ownerReferences": owners}}


async def test_a_claim_that_somebody_made_is_used_as_it_is() -> None:
    found = await seen(Server(claim={"metadata": {"name": "sim-checkpoints"}}))
    assert ("PersistentVolumeClaim", "sim-checkpoints") in found.existing
    assert found.foreign == ()


async def test_the_claim_of_a_deleted_job_is_waited_for() -> None:
    found = await seen(Server(claim=labelled("sim-checkpoints", **{"job-uid": "another"})))
    assert (found.existing, found.foreign) == (frozenset(), ("sim-checkpoints",))


async def test_what_somebody_else_labelled_is_no_child() -> None:
    run = {"phase": "real", "role": "train", "attempt": "1"}
    own, old = labelled("own", **{"job-uid": UID}, **run), labelled("old", **{"job-uid": "another"}, **run)
    found = await seen(Server(Job=[own, old, labelled("evaluation", **{"job-name": "sim"})]))
    assert [job.name for job in found.jobs] == ["own"]
    assert (found.existing, found.foreign) == ({("Job", "own")}, ("old",))

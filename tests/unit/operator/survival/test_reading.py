"""Lists that contain objects of any size and depth."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from pseudoreal_api.base import PLURAL
from pseudoreal_operator.cluster.api import Api, Json
from pseudoreal_operator.cluster.bounds import Unreadable
from pseudoreal_operator.cluster.login import connect

from tests.unit.operator.survival.support.api_server import ApiServer
from tests.unit.operator.survival.support.objects import deep_job, job, large_job


@pytest.fixture
def server() -> Iterator[ApiServer]:
    made = ApiServer()
    with made.running():
        yield made


@pytest.fixture
async def api(server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Api]:
    monkeypatch.setenv("KUBECONFIG", str(server.write_kubeconfig(tmp_path / "kubeconfig")))
    async with connect() as connected:
        yield connected


async def test_a_list_goes_on_after_objects_that_are_beyond_the_bounds(server: ApiServer, api: Api) -> None:
    for number in range(120):
        make = {30: deep_job, 31: large_job, 119: large_job}.get(number, job)
        server.put(PLURAL, make(f"job-{number:03}"))
    skipped = list[tuple[str, str]]()

    def skip(body: Json, reason: Unreadable) -> None:
        skipped.append((body["metadata"]["name"], reason.reason))

    found = [body["metadata"]["name"] async for body in api.each("PseudoRealJob", None, skipped=skip)]
    assert skipped == [("job-030", "TooDeep"), ("job-031", "TooManyValues"), ("job-119", "TooManyValues")]
    assert found == [f"job-{number:03}" for number in range(120) if number not in (30, 31, 119)]
    assert len(server.lists) < 30, "few requests more"


async def test_pages_that_are_too_large_are_made_smaller_and_larger_again(server: ApiServer, api: Api) -> None:
    for number in range(300):
        rest = b',"spec":{"x":"' + b"x" * (400_000 if number < 20 else 100) + b'"}'
        server.put(PLURAL, job(f"job-{number:03}", rest=rest))
    found = [body["metadata"]["name"] async for body in api.each("PseudoRealJob", None)]
    assert found == [f"job-{number:03}" for number in range(300)]
    limits = [int(limit) for _, limit in server.lists]
    assert limits[0] == 100
    assert min(limits) < 20
    assert max(limits[3:]) > 50
    assert len(limits) < 20


async def test_an_object_beyond_the_bounds_is_there_and_has_a_name(server: ApiServer, api: Api) -> None:
    server.put(PLURAL, deep_job("deep"))
    with pytest.raises(Unreadable):
        await api.find("PseudoRealJob", "mallory", "deep")
    metadata = await api.find_metadata("PseudoRealJob", "mallory", "deep")
    assert metadata is not None
    assert (metadata["uid"], metadata["generation"]) == ("uid-deep", 1)
    assert await api.find_metadata("PseudoRealJob", "mallory", "gone") is None
    assert await api.is_listed("PseudoRealJob", "mallory", "deep")
    assert not await api.is_listed("PseudoRealJob", "mallory", "gone")
    versions: list[str] = []
    assert [body async for body in api.each("PseudoRealJob", None, listed=versions.append)] == []
    assert versions == [str(server.version)]


async def test_a_watch_tells_of_an_object_beyond_the_bounds_what_its_metadata_say(server: ApiServer, api: Api) -> None:
    version = str(server.version)
    for name, make in (("deep", deep_job), ("large", large_job), ("good", job)):
        pod = make(name)
        pod.kind = "Pod"
        server.put("pods", pod)
    told = list[tuple[str, bool]]()
    async for _, body in api.watch("Pod", None, "", version):
        told.append((body["metadata"]["name"], "spec" in body))
        if len(told) == 3:
            break
    assert told == [("deep", False), ("large", False), ("good", True)]

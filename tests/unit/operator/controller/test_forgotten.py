"""Deleted jobs that kopf forgot are freed, and no others."""

import asyncio
from typing import cast

from kubernetes.aio.client import ApiException
from pseudoreal_operator.cluster.api import Api, Json
from pseudoreal_operator.cluster.finalizer import FINALIZER
from pseudoreal_operator.controller.forgotten import free_forgotten


class Server:
    """Jobs by name; the first looks fail."""

    def __init__(self, failures: int = 0, **jobs: Json) -> None:
        self._jobs, self._failures = jobs, failures
        self.looks = 0
        self.freed: list[str] = []

    async def list(self, kind: str, namespace: str | None) -> list[Json]:
        assert (kind, namespace) == ("PseudoRealJob", None)
        self.looks += 1
        if self.looks <= self._failures:
            raise ApiException(status=503, reason="Service Unavailable")
        common = {"namespace": "default", "resourceVersion": "1"}
        return [{"metadata": common | {"name": name, "uid": name} | job} for name, job in self._jobs.items()]

    async def merge(self, _kind: str, _namespace: str, name: str, patch: Json) -> None:
        assert patch["metadata"] == {"resourceVersion": "1", "finalizers": ["other"]}
        self.freed.append(name)
        del self._jobs[name]


async def _look(server: Server, looks: int) -> None:
    async with free_forgotten(cast(Api, server), (), every=0):
        while server.looks < looks:
            await asyncio.sleep(0)


async def test_a_deleted_job_is_freed_at_the_second_look() -> None:
    server = Server(forgotten={"deletionTimestamp": "now", "finalizers": ["other", FINALIZER]})
    await _look(server, 1)
    assert server.freed == []
    await _look(server, 3)
    assert server.freed == ["forgotten"]


async def test_the_others_are_left_alone() -> None:
    alive, free = {"finalizers": [FINALIZER]}, {"deletionTimestamp": "now", "finalizers": ["other"]}
    server = Server(alive=alive, free=free, bare={"deletionTimestamp": "now"})
    await _look(server, 4)
    assert server.freed == []


async def test_an_api_server_that_is_away_is_asked_again() -> None:
    server = Server(failures=2, forgotten={"deletionTimestamp": "now", "finalizers": ["other", FINALIZER]})
    await _look(server, 5)
    assert server.freed == ["forgotten"]

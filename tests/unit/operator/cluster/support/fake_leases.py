"""A fake API server that stores one Lease; each client sees it with a delay, or not at all."""

import asyncio
import copy
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from kubernetes.aio.client import ApiException
from pseudoreal_operator.cluster.api import Api

Json = dict[str, Any]


@dataclass
class Server:
    lease: Json | None = None
    version: int = 0
    writes: int = 0
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def store(self, body: Json) -> None:
        self.version += 1
        self.writes += 1
        self.lease = copy.deepcopy(body)
        self.lease["metadata"]["resourceVersion"] = str(self.version)
        self._notify()

    def delete(self) -> None:
        self.version += 1
        self.lease = None
        self._notify()

    async def changed_since(self, version: int) -> None:
        while self.version <= version:
            await self._changed.wait()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    @property
    def holder(self) -> str | None:
        return self.lease["spec"]["holderIdentity"] if self.lease else None


@dataclass
class Client(Api):
    """A client of the fake server. `delay` returns the seconds that a message takes in each direction; None: it is
    lost."""

    server: Server
    delay: Callable[[], float | None] = lambda: 0.0
    _under_way: set["asyncio.Task[Any]"] = field(default_factory=set)

    async def find(self, kind: str, namespace: str, name: str) -> Json | None:
        assert (kind, namespace, name) == ("Lease", "pseudoreal", "pseudoreal")
        found: Json | None = await self._request(self._read)
        return found

    async def create(self, manifest: Json) -> None:  # type: ignore[override]
        await self._request(lambda: self._create(manifest))

    async def merge(self, kind: str, namespace: str, name: str, patch: Json) -> Json:
        assert (kind, namespace, name) == ("Lease", "pseudoreal", "pseudoreal")
        await self._request(lambda: self._merge(patch))
        return patch

    async def watch(
        self,
        kind: str,
        namespace: str | None,
        selector: str,
        version: str,
        *,
        name: str = "",
        opened: Callable[[], object] = lambda: None,
    ) -> AsyncIterator[tuple[str, Json]]:
        assert (kind, namespace, selector, name) == ("Lease", "pseudoreal", "", "pseudoreal")
        await self._wait_for_network()
        opened()
        known = int(version)
        while True:
            await self.server.changed_since(known)
            known = self.server.version
            lease = copy.deepcopy(self.server.lease)
            await self._wait_for_network()
            yield ("MODIFIED", lease) if lease else ("DELETED", {"metadata": {"resourceVersion": str(known)}})

    async def _request(self, serve: Callable[[], Any]) -> Any:
        # A sent message arrives, even if the caller no longer waits for the answer.
        task = asyncio.ensure_future(self._deliver(serve))
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        task.add_done_callback(lambda task: task.cancelled() or task.exception())
        return await asyncio.shield(task)

    async def _deliver(self, serve: Callable[[], Any]) -> Any:
        await self._wait_for_network()
        try:
            return serve()
        finally:
            await self._wait_for_network()

    async def _wait_for_network(self) -> None:
        delay = self.delay()
        if delay is None:
            raise OSError("unreachable")
        await asyncio.sleep(delay)

    def _read(self) -> Json | None:
        return copy.deepcopy(self.server.lease)

    def _create(self, manifest: Json) -> None:
        if self.server.lease:
            raise ApiException(status=409, reason="AlreadyExists")
        self.server.store(manifest)

    def _merge(self, patch: Json) -> None:
        lease = self.server.lease
        if lease is None:
            raise ApiException(status=404)
        if patch["metadata"].get("resourceVersion", lease["metadata"]["resourceVersion"]) != str(self.server.version):
            raise ApiException(status=409, reason="Conflict")
        self.server.store({**lease, "spec": lease.get("spec", {}) | patch["spec"]})

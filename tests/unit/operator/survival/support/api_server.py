"""A small API server in a thread: it stores objects as the bytes that it sends, so objects may have any form, and it
can be away, or faulty, in several ways."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web
from pseudoreal_api.base import API_VERSION, GROUP, KIND, PLURAL, VERSION

Json = dict[str, Any]

_KUBECONFIG = """
apiVersion: v1
kind: Config
clusters: [{name: c, cluster: {server: "http://127.0.0.1:%d"}}]
users: [{name: u, user: {token: x}}]
contexts: [{name: c, context: {cluster: c, user: u, namespace: default}}]
current-context: c
"""
_JOBS, _CHILDREN, _PODS = PLURAL, "jobs", "pods"
_END = "end of the watch"


@dataclass
class Stored:
    """A stored object. `rest`: JSON of the fields after the metadata, each with a comma before it."""

    kind: str
    metadata: Json
    rest: bytes = b""
    managed: bytes = b"[]"
    """JSON of metadata.managedFields."""
    status: Json | None = None

    def body(self) -> bytes:
        """Return the object as the real API server encodes it: fields of a custom resource sorted by name, fields of
        other kinds in the order of their declaration."""
        api_version = API_VERSION if self.kind == KIND else "v1"
        head = json.dumps({"apiVersion": api_version, "kind": self.kind}, separators=(",", ":")).encode()
        status = b"" if self.status is None else b',"status":' + _text(self.status)
        return head[:-1] + b',"metadata":' + self.metadata_text(is_custom=self.kind == KIND) + self.rest + status + b"}"

    def metadata_text(self, *, is_custom: bool) -> bytes:
        if not is_custom:
            return _text(self.metadata)[:-1] + b',"managedFields":' + self.managed + b"}"
        before = {key: value for key, value in self.metadata.items() if key < "managedFields"}
        after = {key: value for key, value in self.metadata.items() if key > "managedFields"}
        parts = [_text(dict(sorted(before.items())))[1:-1], b'"managedFields":' + self.managed]
        return b"{" + b",".join([*filter(None, parts), _text(dict(sorted(after.items())))[1:-1]]) + b"}"

    def partial(self) -> bytes:
        """Return the object's metadata alone."""
        head = b'{"kind":"PartialObjectMetadata","apiVersion":"meta.k8s.io/v1","metadata":'
        return head + self.metadata_text(is_custom=False) + b"}"


@dataclass
class ApiServer:
    """The server. `fault` changes its answers: "refused" closes connections, a number is the status of every answer,
    "404 watch" and "500 event" affect watches of jobs only."""

    objects: dict[str, dict[tuple[str, str], Stored]] = field(
        default_factory=lambda: {_JOBS: {}, _CHILDREN: {}, _PODS: {}}
    )
    fault: str = ""
    version: int = 100
    written: list[tuple[str, str, Json]] = field(default_factory=list)
    """Method, path and body of every write, except writes of Leases."""
    leases: list[Json] = field(default_factory=list)
    """The Lease, as it was last written."""
    lists: list[tuple[str, str]] = field(default_factory=list)
    """Plural and limit of each list request."""
    port: int = 0
    _watches: list[tuple[str, "asyncio.Queue[bytes | str]"]] = field(default_factory=list)
    _loop: asyncio.AbstractEventLoop | None = None

    @contextmanager
    def running(self) -> Iterator[None]:
        started, ended = threading.Event(), threading.Event()

        async def serve() -> None:
            self._loop = asyncio.get_running_loop()
            stop = asyncio.Event()
            self._stop: Callable[[], object] = lambda: self._loop and self._loop.call_soon_threadsafe(stop.set)
            application = web.Application()
            application.router.add_route("*", "/{path:.*}", self._answer)
            runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            self.port = runner.addresses[0][1]
            started.set()
            await stop.wait()
            self.hang_up()
            await runner.cleanup()

        def run() -> None:
            try:
                asyncio.run(serve())
            finally:
                ended.set()

        threading.Thread(target=run, daemon=True).start()
        assert started.wait(30)
        try:
            yield
        finally:
            self._stop()
            ended.wait(10)

    def write_kubeconfig(self, path: Path) -> Path:
        path.write_text(_KUBECONFIG % self.port)
        return path

    def put(self, plural: str, stored: Stored, change: str = "ADDED") -> None:
        """Store an object, and send it to watches."""
        self.version += 1
        stored.metadata["resourceVersion"] = str(self.version)
        key = stored.metadata["namespace"], stored.metadata["name"]
        self.objects[plural][key] = stored
        line = b'{"type":"%s","object":%s}\n' % (change.encode(), stored.body())
        self._tell(plural, line)

    def hang_up(self) -> None:
        """End all watches."""
        for plural in self.objects:
            self._tell(plural, _END)

    def _tell(self, plural: str, line: bytes | str) -> None:
        def tell() -> None:
            for watched, queue in self._watches:
                if watched == plural:
                    queue.put_nowait(line)

        if self._loop:
            self._loop.call_soon_threadsafe(tell)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if self.fault == "refused":
            assert request.transport
            request.transport.close()
        if self.fault.isdecimal():
            return web.json_response({"kind": "Status", "code": int(self.fault)}, status=int(self.fault))
        parts = request.path.strip("/").split("/")
        if parts[-1] in self.objects and request.method == "GET":
            plural, namespace = parts[-1], parts[parts.index("namespaces") + 1] if "namespaces" in parts else None
            if "watch" in request.query:
                return await self._watch(request, plural)
            return await self._list(request, plural, namespace)
        if "leases" in parts:
            return await self._lease(request)
        if request.method != "GET":
            return await self._write(request, parts)
        if len(parts) > 3 and parts[-2] in self.objects:
            return self._get(request, parts)
        return _discovery(request.path)

    async def _list(self, request: web.Request, plural: str, namespace: str | None) -> web.StreamResponse:
        self.lists.append((plural, request.query.get("limit", "")))
        selector, field_selector = request.query.get("labelSelector", ""), request.query.get("fieldSelector", "")
        wanted = dict([selector.split(",")[0].split("=")]) if "=" in selector.split(",")[0] else {}
        name = field_selector.partition("metadata.name=")[2]
        found = [
            one
            for (where, what), one in self.objects[plural].items()
            if namespace in (None, where)
            and name in ("", what)
            and all(one.metadata.get("labels", {}).get(key) == value for key, value in wanted.items())
        ]
        start, limit = int(request.query.get("continue") or 0), int(request.query.get("limit") or 500)
        page, following = found[start : start + limit], start + limit
        metadata: Json = {"resourceVersion": str(self.version)}
        metadata |= {"continue": str(following)} if following < len(found) else {}
        if "PartialObjectMetadataList" in request.headers.get("Accept", ""):
            head = b'{"kind":"PartialObjectMetadataList","apiVersion":"meta.k8s.io/v1","metadata":'
            return await _send(request, head + _text(metadata) + b',"items":[', [one.partial for one in page], b"]}")
        # Fields sorted by name, as in lists of custom resources.
        tail = b'],"kind":"List","metadata":' + _text(metadata) + b"}"
        return await _send(request, b'{"apiVersion":"v1","items":[', [one.body for one in page], tail)

    def _get(self, request: web.Request, parts: list[str]) -> web.Response:
        found = self.objects[parts[-2]].get((parts[-3], parts[-1]))
        if found is None:
            return _not_found(request.path)
        is_partial = "PartialObjectMetadata" in request.headers.get("Accept", "")
        return _json(found.partial() if is_partial else found.body())

    async def _watch(self, request: web.Request, plural: str) -> web.StreamResponse:
        is_jobs = plural == _JOBS
        if is_jobs and self.fault == "404 watch":
            return _not_found(request.path)
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        async with self._watching(plural) as queue:
            # First the objects changed after the requested resourceVersion.
            since = int(request.query.get("resourceVersion") or 0)
            for one in sorted(self.objects[plural].values(), key=lambda one: int(one.metadata["resourceVersion"])):
                if int(one.metadata["resourceVersion"]) > since:
                    await response.write(b'{"type":"MODIFIED","object":' + one.body() + b"}\n")
            while True:
                if is_jobs and self.fault == "500 event":
                    error = {"kind": "Status", "code": 500, "message": "etcd has a new leader"}
                    await response.write(_text({"type": "ERROR", "object": error}) + b"\n")
                    return response
                line = await queue.get()
                if isinstance(line, str):
                    return response
                await response.write(line)

    @asynccontextmanager
    async def _watching(self, plural: str) -> AsyncIterator["asyncio.Queue[bytes | str]"]:
        watch = plural, asyncio.Queue[bytes | str]()
        self._watches.append(watch)
        try:
            yield watch[1]
        finally:
            self._watches.remove(watch)

    async def _lease(self, request: web.Request) -> web.Response:
        if request.method == "GET":
            return _json(_text(self.leases[-1])) if self.leases else _not_found(request.path)
        said = await request.json()
        old = self.leases[-1] if self.leases else {"spec": {}}
        self.version += 1
        metadata = said["metadata"] | {"resourceVersion": str(self.version)}
        self.leases.append({"metadata": metadata, "spec": {**old["spec"], **said["spec"]}})
        return _json(_text(self.leases[-1]))

    async def _write(self, request: web.Request, parts: list[str]) -> web.Response:
        said = await request.json()
        self.written.append((request.method, request.path, said))
        if parts[-1] != "status":
            return web.json_response(said, status=201)
        stored = self.objects[_JOBS][parts[-4], parts[-2]]
        stored.status = (stored.status or {}) | said["status"]
        self.put(_JOBS, stored, "MODIFIED")
        return _json(stored.body())

    def statuses_of(self, name: str) -> list[Json]:
        """Return the statuses that were written to a job."""
        return [said["status"] for _, path, said in self.written if path.endswith(f"/{name}/status")]


def _discovery(path: str) -> web.Response:
    group = {"groupVersion": f"{GROUP}/{VERSION}", "version": VERSION}
    jobs = {
        "name": PLURAL,
        "singularName": "pseudorealjob",
        "namespaced": True,
        "kind": KIND,
        "verbs": ["list", "watch"],
    }
    namespaces = {"name": "namespaces", "singularName": "namespace", "namespaced": False, "kind": "Namespace"}
    known: dict[str, Json] = {
        "/api": {"versions": ["v1"]},
        "/apis": {"groups": [{"name": GROUP, "versions": [group], "preferredVersion": group}]},
        "/api/v1": {"resources": [namespaces | {"verbs": ["list", "watch"]}]},
        f"/apis/{GROUP}/{VERSION}": {"resources": [jobs]},
    }
    return _json(_text(known[path])) if path in known else _not_found(path)


def _not_found(path: str) -> web.Response:
    return web.json_response({"kind": "Status", "code": 404, "reason": "NotFound", "message": path}, status=404)


def _json(body: bytes) -> web.Response:
    return web.Response(body=body, content_type="application/json")


async def _send(request: web.Request, head: bytes, parts: list[Callable[[], bytes]], tail: bytes) -> web.StreamResponse:
    """Send an answer piece by piece: a client that has read enough closes the connection."""
    response = web.StreamResponse(headers={"Content-Type": "application/json"})
    await response.prepare(request)
    await response.write(head)
    for number, part in enumerate(parts):
        await response.write((b"," if number else b"") + part())
    await response.write(tail)
    return response


def _text(value: Json) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()

"""The few requests that the operator makes, JSON in and JSON out.

The generated models of the client would reject objects of a newer Kubernetes, so only its transport is used.
"""

import json
import re
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple
from urllib.parse import quote

import structlog
from aiohttp import ClientPayloadError, ClientTimeout
from kubernetes.aio.client import ApiClient, ApiException
from pseudoreal_api.base import GROUP, PLURAL, VERSION

from pseudoreal_operator.cluster.bounds import (
    MOST_BYTES,
    MOST_PAGE_BYTES,
    TOO_LARGE,
    Overlong,
    Unreadable,
    metadata_of,
    page_head_of,
    read_all,
    read_head,
    read_json,
    read_lines,
)
from pseudoreal_operator.metrics.registry import (
    API_REQUESTS,
    API_SECONDS,
    NO_ANSWER,
    OBJECTS_SKIPPED,
    OVERLONG_LINES,
)
from pseudoreal_operator.untrusted_text import sanitize

Json = dict[str, Any]
_Query = list[tuple[str, str]]

FIELD_MANAGER = "pseudoreal-operator"
REQUEST_SECONDS = 20.0
LOG_SECONDS = 5.0
"""Time limit for reading a log: a kubelet that does not answer must not hold up a pass."""
LOG_BYTES = 2**20
"""Maximum bytes of a log that are read: a line may have any length."""
_ERROR_BYTES = 2**16
"""Maximum bytes that are kept of an error's body."""
PAGE = 100
"""Maximum number of objects in one answer; fewer if they are large, which users decide."""
_LARGER, _SMALLER = 2, 4
"""Factors of the page size: a page that could be read makes the next one larger; one that could not is requested
again with fewer objects."""
WATCH_SECONDS = 300
"""Seconds after which the API server ends a watch: a connection that a load balancer dropped silently must end at
some time."""
_SILENT_SECONDS = 90.0
"""Seconds of silence after which a watch counts as dead: it receives something once a minute, at least a bookmark."""

_TYPE = re.compile(rb'\{"type": ?"([A-Z]+)"')
"""Start of a line of a watch."""
_JSON = "application/json, */*"
_METADATA = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1, application/json"
_LIST_OF_METADATA = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1, application/json"

_COLLECTIONS = {
    "ConfigMap": ("api/v1", "configmaps"),
    "Event": ("api/v1", "events"),
    "Job": ("apis/batch/v1", "jobs"),
    "Lease": ("apis/coordination.k8s.io/v1", "leases"),
    "NetworkPolicy": ("apis/networking.k8s.io/v1", "networkpolicies"),
    "PersistentVolumeClaim": ("api/v1", "persistentvolumeclaims"),
    "Pod": ("api/v1", "pods"),
    "PseudoRealJob": (f"apis/{GROUP}/{VERSION}", PLURAL),
    "Secret": ("api/v1", "secrets"),
    "Service": ("api/v1", "services"),
    "TokenReview": ("apis/authentication.k8s.io/v1", "tokenreviews"),
}


log = structlog.get_logger()


class Name(NamedTuple):
    """Namespace and name of a job. A later job may have the same name; a pass reads which one it is."""

    namespace: str
    name: str


@dataclass(frozen=True)
class _Request:
    method: str
    path: str
    query: _Query = field(default_factory=list)
    body: Json | None = None
    content_type: str = "application/json"
    accept: str = _JSON
    timeout: ClientTimeout = ClientTimeout(total=REQUEST_SECONDS)  # noqa: RUF009 - it is frozen

    def with_query(self, *query: tuple[str, str]) -> "_Request":
        return replace(self, query=[*self.query, *query])


class Api:
    """Requests to the API server. Every method raises ApiException for an answer that it does not expect,
    ClientError or OSError if there is no complete answer, and Unreadable for an answer beyond its bounds."""

    def __init__(self, client: ApiClient) -> None:
        self._client = client

    async def find(self, kind: str, namespace: str, name: str) -> Json | None:
        """Return the object; None if it does not exist."""
        return await self.find_within(MOST_BYTES, kind, namespace, name)

    async def find_within(self, most: int, kind: str, namespace: str, name: str) -> Json | None:
        """Return the object, of at most `most` bytes; None if it does not exist."""
        return await self._unless_missing(self._json(_Request("GET", _path(kind, namespace, name)), most))

    async def find_metadata(self, kind: str, namespace: str, name: str) -> Json | None:
        """Return name, namespace, uid and version of an object and the further metadata within the bounds, even if
        the object itself is beyond them. None if it does not exist."""
        return await self._unless_missing(
            self._metadata(_Request("GET", _path(kind, namespace, name), accept=_METADATA))
        )

    async def _metadata(self, request: _Request) -> Json:
        return metadata_of(await self._head(request)) or {}

    async def _unless_missing(self, answer: Coroutine[Any, Any, Json]) -> Json | None:
        try:
            return await answer
        except ApiException as error:
            if error.status == 404:
                return None
            raise

    async def each(
        self,
        kind: str,
        namespace: str | None,
        selector: str = "",
        *,
        name: str = "",
        skipped: Callable[[Json, Unreadable], None] | None = None,
    ) -> AsyncIterator[Json]:
        """Yield the objects of a kind, page by page, so that only one page is in memory. `namespace`: None for all.
        `name`: only the object of this name. An object beyond the bounds is left out; `skipped` receives it, as far
        as its metadata can be read."""
        query = [("labelSelector", selector)] if selector else []
        request, size = _Request("GET", _path(kind, namespace), [*query, *_named(name)]), PAGE
        following: str | None = None
        while following != "":
            page_request = request.with_query(*_limited(size), *_continued(following))
            try:
                page = await self._json(page_request, MOST_BYTES if size == 1 else MOST_PAGE_BYTES)
            except Unreadable as reason:
                if size > 1:
                    size = max(1, size // _SMALLER)
                    continue
                head = await self._head(replace(page_request, accept=_LIST_OF_METADATA))
                following = page_head_of(head).get("continue") or ""
                metadata = metadata_of(head) or {}
                _skip(kind, metadata, reason)
                if skipped:
                    skipped({"metadata": metadata}, reason)
                continue
            following, size = (page.get("metadata") or {}).get("continue") or "", min(PAGE, size * _LARGER)
            # The consumer may await between two objects, so an object is dropped from the page once it is yielded.
            items = (page.pop("items", None) or [])[::-1]
            while items:
                yield items.pop()

    async def is_listed(self, kind: str, namespace: str, name: str) -> bool:
        """Return whether a list has the object, even if the object is beyond the bounds."""
        query = [*_limited(1), *_named(name)]
        head = await self._head(_Request("GET", _path(kind, namespace), query, accept=_LIST_OF_METADATA))
        page_head_of(head)
        return metadata_of(head) is not None

    async def version(self, kind: str, namespace: str | None, selector: str) -> str:
        """Return the version from which a watch can continue."""
        query = [("labelSelector", selector), *_limited(1)]
        head = await self._head(_Request("GET", _path(kind, namespace), query, accept=_LIST_OF_METADATA))
        return str(page_head_of(head)["resourceVersion"])

    async def watch(
        self, kind: str, namespace: str | None, selector: str, version: str, *, name: str = ""
    ) -> AsyncIterator[tuple[str, Json]]:
        """Yield the changes after `version` as (type, object), until the API server ends the watch. Of a bookmark
        only the version counts; of an object beyond the bounds only the metadata are yielded. `name`: only the
        object of this name. Also raises ApiException for an error that the API server sends in the stream, and
        Unreadable for a change whose version cannot be read."""
        query = [("watch", "true"), ("allowWatchBookmarks", "true"), ("timeoutSeconds", str(WATCH_SECONDS))]
        query += [("labelSelector", selector), ("resourceVersion", version), *_named(name)]
        timeout = ClientTimeout(total=None, sock_connect=REQUEST_SECONDS, sock_read=_SILENT_SECONDS)
        answer = await self._send(_Request("GET", _path(kind, namespace), query, timeout=timeout))
        async with answer.response as response:
            async for line in read_lines(response.content):
                change = _change(kind, line)
                if change["type"] == "ERROR":
                    status = change["object"]
                    raise ApiException(status=status.get("code"), reason=status.get("reason"), body=json.dumps(status))
                yield change["type"], change["object"]

    async def apply(self, manifest: Json, subresource: str = "", *, manager: str = FIELD_MANAGER) -> Json:
        """Apply an object (server-side apply); return the object as it is stored."""
        metadata = manifest["metadata"]
        path = _path(manifest["kind"], metadata["namespace"], metadata["name"], subresource)
        query = [("fieldManager", manager), ("force", "true")]
        return await self._json(_Request("PATCH", path, query, manifest, "application/apply-patch+yaml"))

    async def merge(self, kind: str, namespace: str, name: str, patch: Json) -> None:
        path = _path(kind, namespace, name)
        await self._done(_Request("PATCH", path, [], patch, "application/merge-patch+json"))

    async def create_review(self, review: Json) -> Json:
        """Post a cluster-scoped review, which the API server only answers; return the answer."""
        return await self._json(_Request("POST", _path(review["kind"], None), [], review))

    async def create(self, manifest: Json, *, dry_run: bool = False) -> None:
        """Create an object. `dry_run`: the API server answers as it would, and stores nothing; it also rejects
        unknown fields, which it would otherwise drop."""
        query = [("fieldManager", FIELD_MANAGER)]
        query += [("dryRun", "All"), ("fieldValidation", "Strict")] if dry_run else []
        path = _path(kind_of(manifest), manifest["metadata"]["namespace"])
        await self._done(_Request("POST", path, query, manifest))

    async def post(self, manifest: Json) -> None:
        """Create an object; an existing one of this name is left as it is."""
        try:
            await self.create(manifest)
        except ApiException as error:
            if not is_already_exists(error):
                raise

    async def delete(
        self, kind: str, namespace: str, name: str, uid: str = "", grace_seconds: int | None = None
    ) -> None:
        """Delete an object and, in the background, all objects that it owns. No error if the object, or the one with
        `uid`, does not exist. `grace_seconds`: grace period of a pod, in place of its own. A deletion in progress
        can only be made shorter."""
        # All options in the body: with a body the API server reads no query, and would leave the children of a Job.
        options: Json = {"propagationPolicy": "Background"}
        options |= {"preconditions": {"uid": uid}} if uid else {}
        options |= {} if grace_seconds is None else {"gracePeriodSeconds": grace_seconds}
        try:
            await self._done(_Request("DELETE", _path(kind, namespace, name), [], options))
        except ApiException as error:
            if error.status != 404 and not (uid and error.status == 409):
                raise

    async def log_tail(self, namespace: str, pod: str, container: str, lines: int) -> str:
        query = [("container", container), ("tailLines", str(lines)), ("limitBytes", str(LOG_BYTES))]
        timeout = ClientTimeout(total=LOG_SECONDS)
        request = _Request("GET", _path("Pod", namespace, pod, "log"), query, timeout=timeout)
        return (await self._head(request)).decode(errors="replace")

    async def _json(self, request: _Request, most: int = MOST_BYTES) -> Json:
        async with (await self._send(request)).response as response:
            answer = read_json(await read_all(response.content, most))
        if not isinstance(answer, dict):
            raise ClientPayloadError(f"the answer to {request.method} {request.path} is no object")
        return answer

    async def _head(self, request: _Request) -> bytes:
        async with (await self._send(request)).response as response:
            return await read_head(response.content)

    async def _done(self, request: _Request) -> None:
        """Send a request; only the status of its answer counts."""
        async with (await self._send(request)).response as response:
            await read_head(response.content)

    async def _send(self, request: _Request) -> Any:
        """Send a request; return the client's answer, whose body is still to be read. Raises ApiException for a
        status other than 2xx."""
        sent = await self._client.param_serialize(
            request.method,
            request.path,
            query_params=request.query,
            header_params={"Accept": request.accept, "Content-Type": request.content_type},
            body=request.body,
            auth_settings=["BearerToken"],
        )
        code, started = NO_ANSWER, time.monotonic()
        try:
            answer = await self._client.call_api(*sent, _request_timeout=request.timeout)
            code = str(answer.status)
        finally:
            API_REQUESTS.labels(verb=request.method, code=code).inc()
            API_SECONDS.labels(verb=request.method).observe(time.monotonic() - started)
        if 200 <= answer.status <= 299:
            return answer
        async with answer.response as response:
            data = (await read_head(response.content))[:_ERROR_BYTES]
        error = ApiException(status=answer.status, reason=answer.reason, body=data.decode(errors="replace"))
        error.headers = getattr(answer, "headers", None)
        raise error


def kind_of(manifest: Json) -> str:
    """Return the kind of an object as requests name it: with the API version for a kind that several schedulers
    have."""
    kind = str(manifest["kind"])
    return f"{kind} {manifest['apiVersion']}" if kind == "PodGroup" else kind


def is_already_exists(error: ApiException) -> bool:
    """Return whether the request was rejected because an object of this name exists. Other conflicts, for instance
    between two writers of a quota, mean that nothing was created."""
    return bool(status_of(error).get("reason") == "AlreadyExists")


def message_of(error: ApiException) -> str:
    """Return the message that the API server sent, or a webhook through it; else the client's own."""
    return sanitize(str(status_of(error).get("message") or f"{error.status} {error.reason}"))


def status_of(error: ApiException) -> Json:
    """Return the Status that the API server sent; empty if the answer is not a Status."""
    try:
        found = read_json((error.body or "").encode())
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _change(kind: str, line: bytes | Overlong) -> Json:
    """Return the change that a line of a watch reports. Raises Unreadable."""
    if not isinstance(line, Overlong):
        try:
            change: Json = read_json(line)
            return change
        except Unreadable as error:
            head, reason = line, error
    else:
        OVERLONG_LINES.labels(kind=kind).inc()
        head, reason = line.head, Unreadable(TOO_LARGE, f"it has more than {MOST_BYTES:,} bytes")
    metadata = metadata_of(head)
    _skip(kind, metadata or {}, reason)
    found = _TYPE.match(head)
    if metadata is None or "resourceVersion" not in metadata or found is None:
        raise reason
    return {"type": found[1].decode(), "object": {"metadata": metadata}}


def _skip(kind: str, metadata: Json, reason: Unreadable) -> None:
    OBJECTS_SKIPPED.labels(kind=kind, reason=reason.reason).inc()
    named = {key: metadata.get(key) for key in ("namespace", "name")}
    log.warning("object_skipped", kind=kind, reason=reason.reason, error=str(reason), **named)


def _limited(size: int) -> _Query:
    return [("limit", str(size))]


def _named(name: str) -> _Query:
    return [("fieldSelector", f"metadata.name={name}")] if name else []


def _continued(token: str | None) -> _Query:
    return [("continue", token)] if token else []


def _path(kind: str, namespace: str | None, *rest: str) -> str:
    name, _, version = kind.partition(" ")
    prefix, plural = (f"apis/{version}", f"{name.lower()}s") if version else _COLLECTIONS[kind]
    scope = ["namespaces", namespace] if namespace else []
    return "/" + "/".join([prefix, *(quote(part) for part in [*scope, plural, *rest] if part)])

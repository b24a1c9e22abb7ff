"""Requests of the operator to the API server; objects are plain JSON.

The generated models of the client would reject objects of a newer Kubernetes, so only its transport is used.
"""

import json
import re
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, NamedTuple

import structlog
from aiohttp import ClientPayloadError, ClientTimeout
from kubernetes.aio.client import ApiClient, ApiException
from pseudoreal_api import kubernetes_requests
from pseudoreal_api.kubernetes_requests import Request

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

FIELD_MANAGER = "pseudoreal-operator"
REQUEST_SECONDS = 20.0
_REQUEST_TIMEOUT = ClientTimeout(total=REQUEST_SECONDS)
LOG_SECONDS = 5.0
"""Time limit for reading a log: a kubelet that does not answer must not hold up a pass."""
LOG_BYTES = 2**20
"""Maximum bytes read of a log, because a line may have any length."""
_ERROR_BYTES = 2**16
"""Maximum bytes kept of the body of an error response."""
PAGE = 100
"""Maximum number of objects on a page of a list. Fewer are requested if the objects are large."""
_LARGER, _SMALLER = 2, 4
"""Factor of the page size after a page within the bounds, and divisor after a page beyond the bounds. A page beyond the
bounds is requested again."""
WATCH_SECONDS = 300
"""Seconds after which the API server ends a watch. The limit also ends connections that a load balancer dropped
silently."""
_SILENT_SECONDS = 90.0
"""Seconds of silence after which a watch counts as dead. The API server sends a bookmark about once a minute."""

_TYPE = re.compile(rb'\{"type": ?"([A-Z]+)"')
"""Start of a line of a watch; group 1 is the type of the change."""

log = structlog.get_logger()


class Name(NamedTuple):
    """Namespace and name of a job. A later job may have the same name; a pass tells the jobs apart by uid."""

    namespace: str
    name: str


class Api:
    """Client of the API server. Every method raises ApiException for an error status, ClientError or OSError if no
    complete response arrives, and Unreadable for a response beyond the bounds."""

    def __init__(self, client: ApiClient) -> None:
        self._client = client

    async def find(self, kind: str, namespace: str, name: str) -> Json | None:
        """Return the object; None if it does not exist."""
        return await self.find_within(MOST_BYTES, kind, namespace, name)

    async def find_within(self, most: int, kind: str, namespace: str, name: str) -> Json | None:
        """Return the object; None if it does not exist. Raises Unreadable if the object has more than `most` bytes."""
        return await self._unless_missing(self._json(kubernetes_requests.get(kind, namespace, name), most))

    async def find_metadata(self, kind: str, namespace: str, name: str) -> Json | None:
        """Return the metadata of an object, even if the object is beyond the bounds; None if the object does not exist.
        Metadata beyond the bounds are cut off after name, namespace, uid and version, which come first."""
        return await self._unless_missing(self._metadata(kubernetes_requests.get(kind, namespace, name)))

    async def _metadata(self, request: Request) -> Json:
        return metadata_of(await self._head(request.metadata_only())) or {}

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
        listed: Callable[[str], object] | None = None,
    ) -> AsyncIterator[Json]:
        """Yield the objects of a kind, page by page, so that only one page is in memory. `namespace`: None for all.
        `selector`: label selector. `name`: yield only the object of this name. `skipped`: called for each object beyond
        the bounds, in its place, with the readable part of the metadata and the reason. `listed`: called with the
        version of the list; all pages have the same version."""
        request, size = kubernetes_requests.list_of(kind, namespace, selector, name=name), PAGE
        following: str | None = None
        while following != "":
            page_request = request.page(size, following)
            try:
                page = await self._json(page_request, MOST_BYTES if size == 1 else MOST_PAGE_BYTES)
            except Unreadable as reason:
                if size > 1:
                    size = max(1, size // _SMALLER)
                    continue
                head = await self._head(page_request.list_metadata_only())
                page_head = page_head_of(head)
                if listed and following is None:
                    listed(str(page_head["resourceVersion"]))
                following = page_head.get("continue") or ""
                metadata = metadata_of(head) or {}
                _skip(kind, metadata, reason)
                if skipped:
                    skipped({"metadata": metadata}, reason)
                continue
            page_metadata = page.get("metadata") or {}
            if listed and following is None:
                listed(str(page_metadata.get("resourceVersion")))
            following, size = page_metadata.get("continue") or "", min(PAGE, size * _LARGER)
            # Pop each object before yielding it, so that its memory can be freed: the consumer may wait a long time
            # before it asks for the next object.
            items = (page.pop("items", None) or [])[::-1]
            while items:
                yield items.pop()

    async def first_of(self, kind: str, namespace: str, fields: str, most: int) -> list[Json]:
        """Return at most `most` of the objects that a field selector selects."""
        request = kubernetes_requests.list_of(kind, namespace, fields=fields).page(most, None)
        return (await self._json(request, MOST_PAGE_BYTES)).get("items") or []

    async def is_listed(self, kind: str, namespace: str, name: str) -> bool:
        """Return whether a list has the object, even if the object is beyond the bounds."""
        request = kubernetes_requests.list_of(kind, namespace, name=name).page(1, None)
        head = await self._head(request.list_metadata_only())
        page_head_of(head)  # raises if the answer is not a list; otherwise it would look like a list without the object
        return metadata_of(head) is not None

    async def version(self, kind: str, namespace: str | None, selector: str) -> str:
        """Return the present resource version of the objects of a kind."""
        request = kubernetes_requests.list_of(kind, namespace, selector).page(1, None)
        return str(page_head_of(await self._head(request.list_metadata_only()))["resourceVersion"])

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
        """Yield the changes after `version` as (type, object), until the API server ends the watch. The object of a
        bookmark has only its version. An object beyond the bounds is yielded with only its metadata. `name`: yield only
        changes of the object of this name. `opened`: called once the API server has accepted the watch. Also raises
        ApiException for an error that the API server sends in the stream, and Unreadable for a change whose version
        cannot be read."""
        request = kubernetes_requests.watch(kind, namespace, selector, version, WATCH_SECONDS, name=name)
        timeout = ClientTimeout(total=None, sock_connect=REQUEST_SECONDS, sock_read=_SILENT_SECONDS)
        answer = await self._send(request, timeout)
        opened()
        async with answer.response as response:
            async for line in read_lines(response.content):
                change = _change(kind, line)
                if change["type"] == "ERROR":
                    status = change["object"]
                    raise ApiException(status=status.get("code"), reason=status.get("reason"), body=json.dumps(status))
                yield change["type"], change["object"]

    async def apply(self, manifest: Json, subresource: str = "", *, manager: str = FIELD_MANAGER) -> Json:
        """Apply an object (server-side apply); return the object as it is stored."""
        return await self._json(kubernetes_requests.apply(manifest, subresource, manager))

    async def merge(self, kind: str, namespace: str, name: str, patch: Json) -> Json:
        """Change an object; return it as it is stored."""
        return await self._json(kubernetes_requests.merge_patch(kind, namespace, name, patch))

    async def create_review(self, review: Json) -> Json:
        """Post a cluster-scoped review, such as a TokenReview, and return the API server's answer; nothing is
        stored."""
        return await self._json(kubernetes_requests.review(review))

    async def create(self, manifest: Json, *, dry_run: bool = False) -> Json:
        """Create an object; return it as it is stored. `dry_run`: the API server checks the object and stores nothing.
        It then also rejects unknown fields, which it would otherwise drop."""
        namespace = manifest["metadata"]["namespace"]
        return await self._json(
            kubernetes_requests.create(
                kind_of(manifest), namespace, manifest, FIELD_MANAGER, strict=dry_run, dry_run=dry_run
            )
        )

    async def post(self, manifest: Json) -> None:
        """Create an object; do nothing if an object of this name exists."""
        try:
            await self.create(manifest)
        except ApiException as error:
            if not is_already_exists(error):
                raise

    async def delete(
        self, kind: str, namespace: str, name: str, uid: str = "", grace_seconds: int | None = None
    ) -> None:
        """Delete an object and, in the background, all objects that it owns. No error if the object does not exist, or
        has another uid than `uid`. `grace_seconds`: grace period of a pod in seconds, in place of its own. The grace
        period of a deletion in progress can only be shortened."""
        try:
            await self._done(kubernetes_requests.delete(kind, namespace, name, uid, grace_seconds))
        except ApiException as error:
            if error.status != 404 and not (uid and error.status == 409):
                raise

    async def log_tail(self, namespace: str, pod: str, container: str, lines: int) -> str:
        request = kubernetes_requests.log(namespace, pod, container, tailLines=str(lines), limitBytes=str(LOG_BYTES))
        return (await self._head(request, ClientTimeout(total=LOG_SECONDS))).decode(errors="replace")

    async def _json(self, request: Request, most: int = MOST_BYTES) -> Json:
        async with (await self._send(request)).response as response:
            answer = read_json(await read_all(response.content, most))
        if not isinstance(answer, dict):
            raise ClientPayloadError(f"the answer to {request.method} {request.path} is no object")
        return answer

    async def _head(self, request: Request, timeout: ClientTimeout = _REQUEST_TIMEOUT) -> bytes:
        async with (await self._send(request, timeout)).response as response:
            return await read_head(response.content)

    async def _done(self, request: Request) -> None:
        """Send a request; check the status of the response, and ignore its body."""
        async with (await self._send(request)).response as response:
            await read_head(response.content)

    async def _send(self, request: Request, timeout: ClientTimeout = _REQUEST_TIMEOUT) -> Any:
        """Send a request; return the client's response with its body unread. Raises ApiException for a status other
        than 2xx."""
        sent = await self._client.param_serialize(**request.arguments())
        code, started = NO_ANSWER, time.monotonic()
        try:
            answer = await self._client.call_api(*sent, _request_timeout=timeout)
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
    """Return the kind by which requests name an object. For PodGroup, which several schedulers define, the API version
    is added."""
    kind = str(manifest["kind"])
    return f"{kind} {manifest['apiVersion']}" if kind == "PodGroup" else kind


def is_already_exists(error: ApiException) -> bool:
    """Return whether the request was rejected because an object of this name exists. Other conflicts, for instance
    between two writers of a quota, mean that nothing was created."""
    return bool(status_of(error).get("reason") == "AlreadyExists")


def message_of(error: ApiException) -> str:
    """Return the message of the API server, or of a webhook that it called; without a message, the HTTP status and
    reason."""
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

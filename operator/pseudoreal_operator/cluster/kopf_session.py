"""kopf's connections to the API server. Responses about jobs are bounded and reduced before kopf reads them.

kopf reads a response as a whole, and a list of jobs may have any size and depth. So kopf's list has no items, only the
version at which kopf's watch starts: the operator lists the jobs itself, in bounded pages. Each line of kopf's watch is
parsed within the bounds and passed on with the fields in use. A line beyond the bounds is dropped, and
`Contact.unreadable` is called instead.

All parts of kopf and aiohttp that are used are public: kopf's own sessions (AiohttpSession), and aiohttp's middlewares
and response classes.
"""

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import structlog
from aiohttp import (
    ClientHandlerType,
    ClientPayloadError,
    ClientRequest,
    ClientResponse,
    ClientSession,
    StreamReader,
    TCPConnector,
)
from aiohttp.connector import Connection
from kopf import AiohttpSession, ConnectionInfo
from pseudoreal_api.base import KIND, PLURAL

from pseudoreal_operator.cluster.bounds import (
    MOST_BYTES,
    TOO_LARGE,
    Overlong,
    Unreadable,
    name_of_unreadable,
    page_head_of,
    read_all,
    read_head,
    read_json,
    read_lines,
)
from pseudoreal_operator.metrics.registry import LAST_EVENT, OBJECTS_SKIPPED, OVERLONG_LINES, WATCH_ERRORS

Json = dict[str, Any]

_LIST_OF_METADATA = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1, application/json"
_MOST_KOPF_BYTES = 2**18
"""Maximum bytes of a reduced job for kopf, because kopf may hold the objects of all jobs at once. A usual status is far
smaller."""
_GONE = 410
_MOST_PAUSE_SECONDS = 10.0
_METADATA = ("name", "namespace", "uid", "resourceVersion", "generation", "deletionTimestamp")
_SPEC = ("cleanUp", "deadlines")
"""Fields of a job's metadata and spec that kopf receives; kopf also receives the whole status."""

log = structlog.get_logger()


@dataclass
class Contact:
    """Record of kopf's contact with the API server, and callbacks for changes that kopf does not receive. Used in
    kopf's thread."""

    missed: Callable[[], object]
    """Called before a watch of jobs starts, because the watch does not report earlier changes."""
    unreadable: Callable[[str, str], object]
    """Called with the namespace and name of a job beyond the bounds, if both can be read."""
    pending_requests: int = 0
    """Number of requests that still wait for a response."""
    last: float = field(default_factory=time.monotonic)
    """Monotonic time in seconds of kopf's last request, response or line of a watch."""
    watched: frozenset[str] = frozenset()
    """URL paths of the watches of jobs that have started."""
    has_requested_jobs: bool = False
    failures: int = 0
    """Number of consecutive errors that the API server has sent in watches."""

    def note(self) -> None:
        self.last = time.monotonic()

    async def guard(self, request: ClientRequest, send: ClientHandlerType) -> ClientResponse:
        """aiohttp middleware for kopf's requests: record activity and the number of pending requests, request a list of
        jobs as the metadata of one object, and reduce successful responses."""
        if _is_of_jobs(request.url.path):
            self.has_requested_jobs = True
            if "watch" not in request.url.query:
                request.url = request.url.update_query(limit=1)
                request.headers["Accept"] = _LIST_OF_METADATA
        self.note()
        self.pending_requests += 1
        try:
            response = await send(request)
        finally:
            self.pending_requests -= 1
            self.note()
        if isinstance(response, _Response) and response.status < 300:
            response.follow(self)
        return response


def make_session(info: ConnectionInfo, contact: Contact) -> AiohttpSession:
    """Create the session by which kopf talks to the API server. Called in kopf's event loop."""
    session = ClientSession(
        connector=TCPConnector(limit=0, ssl=info.as_ssl_context()),
        headers=info.as_http_headers(),
        response_class=_Response,
        middlewares=(contact.guard,),
        trust_env=info.trust_env,
        proxy=info.proxy_url,
    )
    return AiohttpSession(
        server=info.server,
        default_namespace=info.default_namespace,
        priority=info.priority,
        expiration=info.expiration,
        aiohttp_session=session,
    )


class _Response(ClientResponse):
    """HTTP response to kopf with a body of at most MOST_BYTES. After `follow`, a response with jobs is reduced to the
    parts that kopf needs."""

    _contact: Contact | None = None

    async def start(self, connection: Connection) -> ClientResponse:
        await super().start(connection)
        self.content = _Content(self.content)  # type: ignore[assignment]
        return self

    def follow(self, contact: Contact) -> None:
        """Reduce a response with jobs for kopf: a list to its version, a watch to parts of the jobs. Leave other
        responses unchanged."""
        if not _is_of_jobs(self.url.path):
            return
        self._contact = contact
        if "watch" in self.url.query:
            contact.watched |= {self.url.path}
            self.content = _JobChanges(self.content, contact)  # type: ignore[assignment]

    async def json(self, **_: Any) -> Any:
        """Return the parsed body; for a list of jobs, a list with its version and no items. Raises JSONDecodeError for
        a body beyond the bounds or invalid JSON, as kopf expects for error responses."""
        try:
            if self._contact is None:
                return read_json(await self.content.read())
            version = page_head_of(await read_head(self.content))["resourceVersion"]
        except Unreadable as error:
            raise json.JSONDecodeError(str(error), "", 0) from error
        # kopf's watch begins at this version, so if the operator lists the jobs from now on, no change is missed.
        self._contact.missed()
        return {"metadata": {"resourceVersion": version}, "items": []}


class _Content:
    """A byte stream with a bounded `read`."""

    def __init__(self, stream: "StreamReader | _Content") -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def iter_any(self) -> AsyncIterator[bytes]:
        return self._stream.iter_any()

    async def read(self, _most: int = -1) -> bytes:
        """Return all bytes. Raises ClientPayloadError if there are more than MOST_BYTES."""
        try:
            return await read_all(self._stream, MOST_BYTES)
        except Unreadable as error:
            raise ClientPayloadError(str(error)) from error


class _JobChanges(_Content):
    """Stream of a watch of jobs. Each line is reduced to the fields that kopf needs."""

    def __init__(self, stream: "StreamReader | _Content", contact: Contact) -> None:
        super().__init__(stream)
        self._contact = contact
        self._last_event = LAST_EVENT.labels(kind=KIND, namespace="")

    async def iter_chunked(self, _bytes: int) -> AsyncIterator[bytes]:
        async for line in read_lines(self._stream):
            self._contact.note()
            self._last_event.set_to_current_time()
            try:
                change = _kopf_change(line)
            except Unreadable as error:
                self._skip(line, error)
                continue
            if code := _error_in(change):
                # kopf would end on an error other than 410, so end only this stream. kopf then resumes the watch after
                # the last change that it received.
                WATCH_ERRORS.labels(kind=KIND).inc()
                self._contact.failures += 1
                pause = min(0.5 * 2.0 ** min(self._contact.failures, 10), _MOST_PAUSE_SECONDS)
                log.info("watch_ended", kind=KIND, error=code, retry_after=pause)
                await asyncio.sleep(pause * random.uniform(0.5, 1))
                if code != _GONE:
                    return
            else:
                self._contact.failures = 0
            yield json.dumps(change).encode() + b"\n"

    def _skip(self, line: bytes | Overlong, error: Unreadable) -> None:
        if isinstance(line, Overlong):
            OVERLONG_LINES.labels(kind=KIND).inc()
        OBJECTS_SKIPPED.labels(kind=KIND, reason=error.reason).inc()
        found = name_of_unreadable(line.head if isinstance(line, Overlong) else line)
        namespace, name = found or (None, None)
        log.warning("object_skipped", kind=KIND, reason=error.reason, error=str(error), namespace=namespace, name=name)
        if found:
            self._contact.unreadable(*found)


def _error_in(change: Any) -> int:
    """Return the error code of a line of a watch; 0 if the line reports a change."""
    if not isinstance(change, dict) or change.get("type") != "ERROR":
        return 0
    error = change.get("object")
    return int(error.get("code") or 500) if isinstance(error, dict) else 500


def _kopf_change(line: bytes | Overlong) -> Any:
    """Return the change in a line of a watch, reduced for kopf. Raises Unreadable if the line is beyond the bounds."""
    if isinstance(line, Overlong):
        raise Unreadable(TOO_LARGE, f"it has more than {MOST_BYTES:,} bytes")
    change = read_json(line)
    with suppress(KeyError, TypeError, AttributeError):
        if change["type"] in ("ADDED", "MODIFIED", "DELETED"):
            change = {"type": change["type"], "object": _job_for_kopf(change["object"])}
    if len(line) > _MOST_KOPF_BYTES and len(json.dumps(change)) > _MOST_KOPF_BYTES:
        raise Unreadable(TOO_LARGE, f"its status has more than {_MOST_KOPF_BYTES:,} bytes")
    return change


def _job_for_kopf(job: Json) -> Json:
    metadata, spec = job["metadata"], job.get("spec") or {}
    return {
        "apiVersion": job.get("apiVersion"),
        "kind": job.get("kind"),
        "metadata": {key: metadata[key] for key in _METADATA if key in metadata},
        "spec": {key: spec[key] for key in _SPEC if key in spec},
        "status": job.get("status") or {},
    }


def _is_of_jobs(path: str) -> bool:
    return path.endswith(f"/{PLURAL}")

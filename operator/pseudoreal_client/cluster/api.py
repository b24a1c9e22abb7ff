"""Requests of the commands to the API server, JSON in and JSON out. Every failure is a `Refusal` with a sentence.

Anyone allowed to write an object decides its size and depth. A list unreadable as a whole is therefore read in smaller
pages. An unreadable object is reported by name, and all others are shown.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple
from urllib.parse import quote

from kubernetes.client import ApiClient
from pseudoreal_api.base import GROUP, KIND, PLURAL, VERSION
from pseudoreal_api.names import CONTAINER
from pseudoreal_operator.untrusted_text import sanitize
from pydantic_core import from_json
from urllib3.exceptions import HTTPError

from pseudoreal_client.cluster.failures import Asked, failure, no_answer
from pseudoreal_client.refusal import Refusal

Json = dict[str, Any]

FIELD_MANAGER = "pseudoreal-cli"
_PAGE = 500
"""Maximal number of objects per page."""
MOST_BYTES = 2**25
"""Maximal bytes of a response; etcd stores at most 1.5 MiB per object."""
_CONNECT_SECONDS = 10.0
_ANSWER_SECONDS = 60.0
_JSON, _MERGE = "application/json", "application/merge-patch+json"
_METADATA = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"


class Kind(NamedTuple):
    path: str
    plural: str


JOBS = Kind(f"apis/{GROUP}/{VERSION}", PLURAL)
PODS = Kind("api/v1", "pods")
EVENTS = Kind("api/v1", "events")
NODES = Kind("api/v1", "nodes")


@dataclass(frozen=True)
class _Request:
    verb: str
    path: str
    asked: Asked
    query: list[tuple[str, str]] = field(default_factory=list)
    body: Json | None = None
    content_type: str = _JSON
    accept: str = f"{_JSON}, */*"
    answer_seconds: float | None = _ANSWER_SECONDS


class Conflict(Refusal):
    """The object has changed since it was read."""


class _Unreadable(Exception):
    """A response is too large, or is not readable JSON; the text gives the reason."""


class Api:
    """Client of one API server. `warn` receives a sentence about each unreadable object of a list."""

    def __init__(self, client: ApiClient, warn: Callable[[str], None]) -> None:
        self._client, self._warn = client, warn

    def job(self, namespace: str, name: str) -> Json:
        asked = Asked("get", KIND, name, namespace)
        return self._json(_Request("GET", _path(JOBS, namespace, name), asked))

    def each(self, kind: Kind, namespace: str | None, selector: str = "", *, fields: str = "") -> list[Json]:
        """Return all objects of a kind in the namespace; None means all namespaces. The objects lack `kind` and
        `apiVersion`."""
        query = [("labelSelector", selector)] if selector else []
        query += [("fieldSelector", fields)] if fields else []
        return [*self._pages(kind, namespace, query)]

    def _pages(self, kind: Kind, namespace: str | None, query: list[tuple[str, str]]) -> Iterator[Json]:
        asked, following, most = Asked("list", kind.plural, "", namespace), "", _PAGE
        while True:
            more = [("limit", str(most)), *([("continue", following)] if following else [])]
            request = _Request("GET", _path(kind, namespace), asked, [*query, *more])
            try:
                page = self._read(request)
            except _Unreadable as reason:
                if most > 1:
                    most = max(1, most // 8)
                    continue
                page = self._read_metadata(request, reason)
            else:
                yield from page["items"]
                most = min(_PAGE, 2 * most)
            following = page["metadata"].get("continue") or ""
            if not following:
                return

    def _read_metadata(self, request: _Request, reason: _Unreadable) -> Json:
        """Read the page again with metadata only, and warn of each of its objects by name."""
        try:
            page = self._read(replace(request, accept=_METADATA))
        except _Unreadable as error:
            raise Refusal(f"the cluster's answer to list {request.asked.kind} cannot be read: {error}") from error
        for body in page["items"]:
            name, namespace = body["metadata"]["name"], body["metadata"].get("namespace")
            place = f" in namespace {namespace}" if namespace else ""
            self._warn(
                f"{sanitize(name)}{place}, one of the {request.asked.kind}, is left out: {reason}; `kubectl get"
                f" {request.asked.kind} {sanitize(name)}{f' -n {namespace}' if namespace else ''} -o yaml` may show it"
            )
        return page

    def create_job(self, body: Json, namespace: str, *, dry_run: bool) -> Json:
        """Create the job. `dry_run`: the API server validates the job and stores nothing."""
        query = [("fieldManager", FIELD_MANAGER), ("fieldValidation", "Strict")]
        query += [("dryRun", "All")] if dry_run else []
        asked = Asked("create", KIND, str(body["metadata"].get("name", "")), namespace)
        return self._json(_Request("POST", _path(JOBS, namespace), asked, query, body))

    def patch_job(self, namespace: str, name: str, patch: Json) -> Json:
        """Apply a merge patch to the job. Raises Conflict if the patch's resourceVersion is not the newest."""
        asked = Asked("patch", KIND, name, namespace)
        query = [("fieldManager", FIELD_MANAGER)]
        return self._json(_Request("PATCH", _path(JOBS, namespace, name), asked, query, patch, _MERGE))

    def log(
        self,
        namespace: str,
        pod: str,
        *,
        follow: bool = False,
        tail: int | None = None,
        since_seconds: int | None = None,
    ) -> Iterator[str]:
        """Yield the lines of the trainer container's log as they arrive; the last one may be incomplete.

        `since_seconds` limits the log to lines of the newest seconds.
        """
        query = [("container", CONTAINER)]
        query += [("follow", "true")] if follow else []
        query += [("tailLines", str(tail))] if tail is not None else []
        query += [("sinceSeconds", str(since_seconds))] if since_seconds is not None else []
        path, asked = _path(PODS, namespace, pod, "log"), Asked("get", "the log of pod", pod, namespace)
        request = _Request("GET", path, asked, query, answer_seconds=None if follow else _ANSWER_SECONDS)
        return self._lines(request)

    def _lines(self, request: _Request) -> Iterator[str]:
        answer = self._send(request)
        rest = b""
        try:
            for chunk in answer.stream():
                *lines, rest = (rest + chunk).split(b"\n")
                yield from (line.decode(errors="replace") for line in lines)
        except (HTTPError, OSError) as error:
            raise no_answer(self._host, request.asked, error) from error
        finally:
            answer.close()
        if rest:
            yield rest.decode(errors="replace")

    def _json(self, request: _Request) -> Json:
        try:
            return self._read(request)
        except _Unreadable as error:
            asked = request.asked
            raise Refusal(f"{asked.kind} {asked.name} {asked.place} cannot be read: {error}") from error

    def _read(self, request: _Request) -> Json:
        """Return the JSON of the response. Raises _Unreadable."""
        answer, data = self._send(request), bytearray()
        try:
            for chunk in answer.stream():
                data += chunk
                if len(data) > MOST_BYTES:
                    raise _Unreadable(f"it has more than {MOST_BYTES >> 20} MiB")
        except (HTTPError, OSError) as error:
            raise no_answer(self._host, request.asked, error) from error
        finally:
            answer.close()
        try:
            # from_json limits the nesting to 200 levels, so a deep document cannot overflow the interpreter's stack.
            found: Json = from_json(data)
        except ValueError as error:
            raise _Unreadable(f"it is no JSON, or nested too deeply ({sanitize(str(error), 100)})") from error
        return found

    def _send(self, request: _Request) -> Any:
        """Return urllib3's response, with the body unread."""
        sent = self._client.param_serialize(
            request.verb,
            f"/{request.path}",
            query_params=request.query,
            header_params={"Accept": request.accept, "Content-Type": request.content_type},
            body=request.body,
            auth_settings=["BearerToken"],
        )
        limits = (_CONNECT_SECONDS, request.answer_seconds)
        try:
            answer = self._client.call_api(*sent, _request_timeout=limits).response
            if 200 <= answer.status <= 299:
                return answer
            text = answer.data.decode(errors="replace")
        except (HTTPError, OSError) as error:
            raise no_answer(self._host, request.asked, error) from error
        kind = Conflict if answer.status == 409 and request.verb == "PATCH" else Refusal
        raise failure(answer.status, text, request.asked, kind)

    @property
    def _host(self) -> str:
        return str(self._client.configuration.host)


def _path(kind: Kind, namespace: str | None, *names: str) -> str:
    place = ["namespaces", namespace] if namespace else []
    return "/".join([kind.path, *(quote(part, safe="") for part in (*place, kind.plural, *names))])

"""Requests of the commands to the API server, JSON in and JSON out. Every failure is a CommandError.

Anyone allowed to write an object decides its size and depth. So a page of a list that cannot be read is requested again
with fewer objects. An object that cannot be read is reported by name, and all other objects are shown.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from kubernetes.client import ApiClient
from pseudoreal_api import kubernetes_requests
from pseudoreal_api.base import KIND
from pseudoreal_api.kubernetes_requests import Request, plural_of
from pseudoreal_api.names import CONTAINER
from pseudoreal_operator.untrusted_text import sanitize
from pseudoreal_trainer.cli.common import CommandError
from pydantic_core import from_json
from urllib3.exceptions import HTTPError

from pseudoreal_client.cluster.errors import Target, error_of_response, unreachable

Json = dict[str, Any]

FIELD_MANAGER = "pseudoreal-cli"
_PAGE = 500
"""Maximum number of objects per page."""
MOST_BYTES = 2**25
"""Maximum bytes of a response; etcd stores at most 1.5 MiB per object."""
_CONNECT_SECONDS = 10.0
_ANSWER_SECONDS = 60.0


@dataclass(frozen=True)
class _Call:
    """A request, and its target for the sentence about a failure."""

    request: Request
    target: Target
    answer_seconds: float | None = _ANSWER_SECONDS
    """Seconds without a byte of the answer after which the cluster counts as unreachable; None: no limit."""


class Conflict(CommandError):
    """The object has changed since it was read."""


class _Unreadable(Exception):
    """A response is too large, or is not readable JSON; the text gives the reason."""


class Api:
    """Client of one API server. `warn` receives a sentence about each unreadable object of a list."""

    def __init__(self, client: ApiClient, warn: Callable[[str], None]) -> None:
        self._client, self._warn = client, warn

    def job(self, namespace: str, name: str) -> Json:
        target = Target("get", KIND, name, namespace)
        return self._json(_Call(kubernetes_requests.get(KIND, namespace, name), target))

    def claim(self, namespace: str, name: str) -> Json:
        kind = "PersistentVolumeClaim"
        return self._json(_Call(kubernetes_requests.get(kind, namespace, name), Target("get", kind, name, namespace)))

    def each(self, kind: str, namespace: str | None, selector: str = "", *, fields: str = "") -> list[Json]:
        """Return all objects of a kind in the namespace; None means all namespaces. The objects lack `kind` and
        `apiVersion`."""
        request = kubernetes_requests.list_of(kind, namespace, selector, fields=fields)
        return [*self._pages(request, Target("list", plural_of(kind), "", namespace))]

    def _pages(self, request: Request, target: Target) -> Iterator[Json]:
        following, most = "", _PAGE
        while True:
            page_request = request.page(most, following)
            try:
                page = self._read(_Call(page_request, target))
            except _Unreadable as reason:
                if most > 1:
                    most = max(1, most // 8)
                    continue
                page = self._read_metadata(_Call(page_request.list_metadata_only(), target), reason)
            else:
                yield from page["items"]
                most = min(_PAGE, 2 * most)
            following = page["metadata"].get("continue") or ""
            if not following:
                return

    def _read_metadata(self, call: _Call, reason: _Unreadable) -> Json:
        """Return the page with metadata in place of its objects, and warn about each object by name."""
        try:
            page = self._read(call)
        except _Unreadable as error:
            raise CommandError(f"the cluster's answer to list {call.target.kind} cannot be read: {error}") from error
        for body in page["items"]:
            name, namespace = body["metadata"]["name"], body["metadata"].get("namespace")
            place = f" in namespace {namespace}" if namespace else ""
            self._warn(
                f"{sanitize(name)}{place}, one of the {call.target.kind}, is left out: {reason}; `kubectl get"
                f" {call.target.kind} {sanitize(name)}{f' -n {namespace}' if namespace else ''} -o yaml` may show it"
            )
        return page

    def create_job(self, body: Json, namespace: str, *, dry_run: bool) -> Json:
        """Create the job. `dry_run`: the API server validates the job and stores nothing."""
        target = Target("create", KIND, str(body["metadata"].get("name", "")), namespace)
        request = kubernetes_requests.create(KIND, namespace, body, FIELD_MANAGER, strict=True, dry_run=dry_run)
        return self._json(_Call(request, target))

    def patch_job(self, namespace: str, name: str, patch: Json) -> Json:
        """Apply a merge patch to the job. Raises Conflict if the patch's resourceVersion is not the newest."""
        target = Target("patch", KIND, name, namespace)
        return self._json(_Call(kubernetes_requests.merge_patch(KIND, namespace, name, patch, FIELD_MANAGER), target))

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

        `since_seconds`: maximum age of the lines in seconds.
        """
        options = {"follow": "true"} if follow else {}
        options |= {"tailLines": str(tail)} if tail is not None else {}
        options |= {"sinceSeconds": str(since_seconds)} if since_seconds is not None else {}
        request = kubernetes_requests.log(namespace, pod, CONTAINER, **options)
        target = Target("get", "the log of pod", pod, namespace)
        return self._lines(_Call(request, target, None if follow else _ANSWER_SECONDS))

    def _lines(self, call: _Call) -> Iterator[str]:
        answer = self._send(call)
        rest = b""
        try:
            for chunk in answer.stream():
                *lines, rest = (rest + chunk).split(b"\n")
                yield from (line.decode(errors="replace") for line in lines)
        except (HTTPError, OSError) as error:
            raise unreachable(self._host, call.target, error) from error
        finally:
            answer.close()
        if rest:
            yield rest.decode(errors="replace")

    def _json(self, call: _Call) -> Json:
        try:
            return self._read(call)
        except _Unreadable as error:
            target = call.target
            raise CommandError(f"{target.kind} {target.name} {target.place} cannot be read: {error}") from error

    def _read(self, call: _Call) -> Json:
        """Return the JSON of the response. Raises _Unreadable."""
        answer, data = self._send(call), bytearray()
        try:
            for chunk in answer.stream():
                data += chunk
                if len(data) > MOST_BYTES:
                    raise _Unreadable(f"it has more than {MOST_BYTES >> 20} MiB")
        except (HTTPError, OSError) as error:
            raise unreachable(self._host, call.target, error) from error
        finally:
            answer.close()
        try:
            # from_json limits the nesting to 200 levels, so a deep document cannot overflow the interpreter's stack.
            found: Json = from_json(data)
        except ValueError as error:
            raise _Unreadable(f"it is no JSON, or nested too deeply ({sanitize(str(error), 100)})") from error
        return found

    def _send(self, call: _Call) -> Any:
        """Return urllib3's response, with the body unread."""
        request = call.request
        sent = self._client.param_serialize(
            request.method,
            request.path,
            query_params=[*request.query],
            header_params={"Accept": request.accept, "Content-Type": request.content_type},
            body=request.body,
            auth_settings=["BearerToken"],
        )
        limits = (_CONNECT_SECONDS, call.answer_seconds)
        try:
            answer = self._client.call_api(*sent, _request_timeout=limits).response
            if 200 <= answer.status <= 299:
                return answer
            text = answer.data.decode(errors="replace")
        except (HTTPError, OSError) as error:
            raise unreachable(self._host, call.target, error) from error
        kind = Conflict if answer.status == 409 and request.method == "PATCH" else CommandError
        raise error_of_response(answer.status, text, call.target, kind)

    @property
    def _host(self) -> str:
        return str(self._client.configuration.host)

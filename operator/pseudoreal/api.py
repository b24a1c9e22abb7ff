"""Requests of the client to the API server, JSON in and JSON out. Every failure is a ClientError.

Anyone allowed to write an object decides its size and depth. So a page of a list that cannot be read is requested again
with fewer objects. An object that cannot be read is reported by name, and all other objects are shown.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from kubernetes.client import ApiClient
from pseudoreal_api import kubernetes_requests
from pseudoreal_api.base import KIND
from pseudoreal_api.kubernetes_requests import Request, plural_of
from pseudoreal_api.names import CONTAINER
from pseudoreal_operator.untrusted_text import sanitize
from pydantic_core import from_json
from urllib3.exceptions import HTTPError

from pseudoreal.errors import ClientError, Target, Unreadable, error_of_response, unreachable

Json = dict[str, Any]

FIELD_MANAGER = "pseudoreal-cli"
_PAGE = 500
"""Maximum number of objects per page."""
MOST_BYTES = 2**25
"""Maximum bytes of a response; etcd stores at most 1.5 MiB per object."""
MOST_LINE_BYTES = 2**20
"""Maximum bytes of a line of a log; the rest of a longer line is left out."""
MOST_LOG_BYTES = 2**28
"""Maximum bytes of a log that is read without following it."""
_MOST_ERROR_BYTES = 2**20
"""Maximum bytes that are read of an error's text."""
_CONNECT_SECONDS = 10.0
_ANSWER_SECONDS = 60.0
_WATCH_SECONDS = 300
"""Seconds after which the API server ends a watch."""
_SILENCE_SECONDS = 150.0
"""Seconds without a byte after which a watch counts as broken: the API server sends a bookmark about once a minute."""


@dataclass(frozen=True)
class _Call:
    """A request, and its target for the sentence about a failure."""

    request: Request
    target: Target
    answer_seconds: float | None = _ANSWER_SECONDS
    """Seconds without a byte of the answer after which the cluster counts as unreachable; None: no limit, except that
    TCP notices a cluster that is gone."""


class _Broken(Exception):
    """A response is too large, or is not readable JSON; the text gives the reason."""


class Lines(Iterator[bytes]):
    """Lines of a response as they arrive, without line feeds; of a longer line, `most` + 1 bytes. The last line may be
    incomplete. `close` may be called from any thread, and ends the iteration."""

    def __init__(self, answer: Any, most: int, unreachable: Callable[[Exception], ClientError]) -> None:
        self._answer, self._unreachable = answer, unreachable
        self._lines = _split_lines(self._chunks(), most)
        self._is_closed = False
        self.received = 0
        """Number of bytes received so far."""

    def _chunks(self) -> Iterator[bytes]:
        for chunk in self._answer.stream():
            self.received += len(chunk)
            yield chunk

    def __next__(self) -> bytes:
        try:
            return next(self._lines)
        except (HTTPError, OSError, ValueError) as error:
            self._answer.close()
            if self._is_closed:
                raise StopIteration from None
            raise self._unreachable(error) from error
        except StopIteration:
            self._answer.close()
            raise

    def close(self) -> None:
        self._is_closed = True
        # A response that has ended has no socket any more.
        with suppress(ValueError, RuntimeError, OSError):
            self._answer.shutdown()


class LogLines(Iterator[str]):
    """Lines of a pod's log. `most`: raises Unreadable at the end of as many bytes, as the rest was not sent."""

    def __init__(self, lines: Lines, most: int | None, pod: str) -> None:
        self._lines, self._most, self._pod = lines, most, pod

    def __next__(self) -> str:
        line = next(self._lines, None)
        if line is not None:
            return line[:MOST_LINE_BYTES].decode(errors="replace")
        if self._most is not None and self._lines.received >= self._most:
            raise Unreadable(
                f"the log of pod {self._pod} has more than {self._most >> 20} MiB; ask for its newest lines (tail)"
            )
        raise StopIteration

    def close(self) -> None:
        """End the iteration; any thread may call it."""
        self._lines.close()


def _split_lines(chunks: Iterable[bytes], most: int) -> Iterator[bytes]:
    kept = bytearray()
    for chunk in chunks:
        first, *others = chunk.split(b"\n")
        kept += first[: most + 1 - len(kept)]
        for part in others:
            yield bytes(kept)
            kept = bytearray(part[: most + 1])
    if kept:
        yield bytes(kept)


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
        return [body for page in self.pages(kind, namespace, selector, fields=fields) for body in page["items"]]

    def pages(self, kind: str, namespace: str | None, selector: str = "", *, fields: str = "") -> Iterator[Json]:
        """Yield the objects page by page, as lists of Kubernetes: `items`, and `metadata` with the version of the
        list, which is that of all its pages."""
        request = kubernetes_requests.list_of(kind, namespace, selector, fields=fields)
        target = Target("list", plural_of(kind), "", namespace)
        following, most = "", _PAGE
        while True:
            page_request = request.page(most, following)
            try:
                page = self._read(_Call(page_request, target))
            except _Broken as reason:
                if most > 1:
                    most = max(1, most // 8)
                    continue
                page = self._read_metadata(_Call(page_request.list_metadata_only(), target), reason)
            else:
                yield page
                most = min(_PAGE, 2 * most)
            following = page["metadata"].get("continue") or ""
            if not following:
                return

    def _read_metadata(self, call: _Call, reason: _Broken) -> Json:
        """Return the page with metadata in place of its objects, and warn about each object by name."""
        try:
            page = self._read(call)
        except _Broken as error:
            raise Unreadable(f"the cluster's answer to list {call.target.kind} cannot be read: {error}") from error
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

    def delete_job(self, namespace: str, name: str) -> None:
        """Delete the job and, in the background, all that it owns."""
        self._json(_Call(kubernetes_requests.delete(KIND, namespace, name), Target("delete", KIND, name, namespace)))

    def watch_job(self, namespace: str, name: str, version: str) -> Lines:
        """Return the changes of the job after `version`, one JSON object a line (see `event_of`). The API server ends
        the watch after some minutes."""
        request = kubernetes_requests.watch(KIND, namespace, "", version, _WATCH_SECONDS, name=name)
        call = _Call(request, Target("watch", KIND, name, namespace), _SILENCE_SECONDS)
        return self._lines(call, MOST_BYTES)

    def watch_jobs(self, namespace: str | None, version: str) -> Lines:
        """Return the changes of all jobs after `version`, as `watch_job` does. `namespace`: None: of all namespaces."""
        request = kubernetes_requests.watch(KIND, namespace, "", version, _WATCH_SECONDS)
        return self._lines(_Call(request, Target("watch", KIND, "", namespace), _SILENCE_SECONDS), MOST_BYTES)

    def event_of(self, line: bytes, namespace: str | None, name: str) -> tuple[str, Json]:
        """Return type and object of a change. Raises ClientError for an error of the watch."""
        target = Target("watch", KIND, name, namespace)
        if len(line) > MOST_BYTES:
            raise Unreadable(f"a change of {KIND} {name} {target.place} has more than {MOST_BYTES >> 20} MiB")
        try:
            event: Json = from_json(line)
            kind, body = str(event["type"]), event["object"]
            if kind == "ERROR":
                raise error_of_response(int(body.get("code") or 500), json.dumps(body), target)
            if not body["metadata"]["resourceVersion"]:
                raise ValueError("a change without a version")
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            # A line that was cut off, or comes from a proxy.
            raise unreachable(self._host, target, error) from error
        return kind, body

    def log(
        self,
        namespace: str,
        pod: str,
        *,
        follow: bool = False,
        tail: int | None = None,
        since_seconds: int | None = None,
    ) -> "LogLines":
        """Return the lines of the trainer container's log as they arrive; the last one may be incomplete.

        `since_seconds`: maximum age of the lines in seconds. Raises Unreadable, unless it follows the log, after
        MOST_LOG_BYTES.
        """
        options = {"follow": "true"} if follow else {"limitBytes": str(MOST_LOG_BYTES)}
        options |= {"tailLines": str(tail)} if tail is not None else {}
        options |= {"sinceSeconds": str(since_seconds)} if since_seconds is not None else {}
        request = kubernetes_requests.log(namespace, pod, CONTAINER, **options)
        target = Target("get", "the log of pod", pod, namespace)
        lines = self._lines(_Call(request, target, None if follow else _ANSWER_SECONDS), MOST_LINE_BYTES)
        return LogLines(lines, None if follow else MOST_LOG_BYTES, pod)

    def _lines(self, call: _Call, most: int) -> Lines:
        return Lines(self._send(call), most, lambda error: unreachable(self._host, call.target, error))

    def _json(self, call: _Call) -> Json:
        try:
            return self._read(call)
        except _Broken as error:
            target = call.target
            raise Unreadable(f"{target.kind} {target.name} {target.place} cannot be read: {error}") from error

    def _read(self, call: _Call) -> Json:
        """Return the JSON of the response. Raises _Broken."""
        answer, data = self._send(call), bytearray()
        try:
            for chunk in answer.stream():
                data += chunk
                if len(data) > MOST_BYTES:
                    raise _Broken(f"it has more than {MOST_BYTES >> 20} MiB")
        except (HTTPError, OSError) as error:
            raise unreachable(self._host, call.target, error) from error
        finally:
            answer.close()
        try:
            # from_json limits the nesting to 200 levels, so a deep document cannot overflow the interpreter's stack.
            found: Json = from_json(data)
        except ValueError as error:
            raise _Broken(f"it is no JSON, or nested too deeply ({sanitize(str(error), 100)})") from error
        return found

    def _send(self, call: _Call) -> Any:
        """Return urllib3's response, with the body unread."""
        sent = self._client.param_serialize(**call.request.arguments())
        limits = (_CONNECT_SECONDS, call.answer_seconds)
        try:
            answer = self._client.call_api(*sent, _request_timeout=limits).response
            if 200 <= answer.status <= 299:
                return answer
            text = answer.read(_MOST_ERROR_BYTES).decode(errors="replace")
            answer.close()
        except (HTTPError, OSError) as error:
            raise unreachable(self._host, call.target, error) from error
        raise error_of_response(answer.status, text, call.target)

    @property
    def _host(self) -> str:
        return str(self._client.configuration.host)

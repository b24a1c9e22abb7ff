"""The requests of the commands, as JSON in and JSON out. Every failure is a Refusal with a sentence."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import quote

from kubernetes.client import ApiClient
from pseudoreal_api.base import GROUP, KIND, PLURAL, VERSION
from pseudoreal_api.names import CONTAINER
from urllib3.exceptions import HTTPError

from pseudoreal_client.cluster.failures import Asked, failure, no_answer
from pseudoreal_client.refusal import Refusal

Json = dict[str, Any]

FIELD_MANAGER = "pseudoreal-cli"
_PAGE = "500"
_CONNECT_SECONDS = 10.0
_ANSWER_SECONDS = 60.0
_MERGE = "application/merge-patch+json"


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
    content_type: str = "application/json"
    answer_seconds: float | None = _ANSWER_SECONDS


class Conflict(Refusal):
    """The object has changed since it was read."""


class Api:
    """Requests to one API server."""

    def __init__(self, client: ApiClient) -> None:
        self._client = client

    def job(self, namespace: str, name: str) -> Json:
        asked = Asked("get", KIND, name, namespace)
        return self._json(_Request("GET", _path(JOBS, namespace, name), asked))

    def each(self, kind: Kind, namespace: str | None, selector: str = "", *, fields: str = "") -> list[Json]:
        """All objects of a kind; without a namespace those of all namespaces. They have no kind of their own."""
        query = [("limit", _PAGE)]
        query += [("labelSelector", selector)] if selector else []
        query += [("fieldSelector", fields)] if fields else []
        return [*self._pages(kind, namespace, query)]

    def _pages(self, kind: Kind, namespace: str | None, query: list[tuple[str, str]]) -> Iterator[Json]:
        asked, following = Asked("list", kind.plural, "", namespace), ""
        while True:
            more = [("continue", following)] if following else []
            page = self._json(_Request("GET", _path(kind, namespace), asked, [*query, *more]))
            yield from page["items"]
            following = page["metadata"].get("continue") or ""
            if not following:
                return

    def create_job(self, body: Json, namespace: str, *, dry_run: bool) -> Json:
        """Creates the job. `dry_run`: the API server checks it, and stores nothing."""
        query = [("fieldManager", FIELD_MANAGER), ("fieldValidation", "Strict")]
        query += [("dryRun", "All")] if dry_run else []
        asked = Asked("create", KIND, str(body["metadata"].get("name", "")), namespace)
        return self._json(_Request("POST", _path(JOBS, namespace), asked, query, body))

    def patch_job(self, namespace: str, name: str, patch: Json) -> Json:
        """Merges the patch into the job. Raises Conflict when the patch names another version than the newest."""
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
        """The lines of the trainer's log, as they come. The last one may be cut. `since_seconds`: only those of the
        newest seconds."""
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
        answer: Json = json.loads(self._send(request).data)
        return answer

    def _send(self, request: _Request) -> Any:
        """The answer of urllib3, whose body is yet to be read."""
        sent = self._client.param_serialize(
            request.verb,
            f"/{request.path}",
            query_params=request.query,
            header_params={"Accept": "application/json, */*", "Content-Type": request.content_type},
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

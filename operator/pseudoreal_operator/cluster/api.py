"""The few requests that the operator makes, as JSON in and JSON out.

The generated models of the client would refuse objects of a newer Kubernetes; only its transport is used.
"""

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import quote

from aiohttp import ClientTimeout
from kubernetes.aio.client import ApiClient, ApiException
from pseudoreal_api.base import GROUP, PLURAL, VERSION

from pseudoreal_operator.foreign import clean
from pseudoreal_operator.metrics.registry import API_REQUESTS, NO_ANSWER

Json = dict[str, Any]
_Query = list[tuple[str, str]]

FIELD_MANAGER = "pseudoreal-operator"
REQUEST_SECONDS = 20.0
LOG_SECONDS = 5.0
"""Time limit for reading a log: a kubelet that does not answer must not hold up a pass."""
LOG_BYTES = 2**20
"""Most bytes of a log that are read: a line may be of any length."""
PAGE = 100
"""Most objects of one answer: users decide how large each is."""
WATCH_SECONDS = 300
"""Seconds after which the API server ends a watch: a connection that a load balancer dropped silently must end some
day."""
_SILENT_SECONDS = 90.0
"""Seconds of silence after which a watch is taken for dead: it is told something once a minute, be it a bookmark."""

_COLLECTIONS = {
    "ConfigMap": ("api/v1", "configmaps"),
    "Event": ("api/v1", "events"),
    "Job": ("apis/batch/v1", "jobs"),
    "Lease": ("apis/coordination.k8s.io/v1", "leases"),
    "NetworkPolicy": ("apis/networking.k8s.io/v1", "networkpolicies"),
    "PersistentVolumeClaim": ("api/v1", "persistentvolumeclaims"),
    "Pod": ("api/v1", "pods"),
    "PseudoRealJob": (f"apis/{GROUP}/{VERSION}", PLURAL),
    "Service": ("api/v1", "services"),
    "TokenReview": ("apis/authentication.k8s.io/v1", "tokenreviews"),
}


class Name(NamedTuple):
    """Namespace and name of a job. Another job of that name may come later; a pass reads which one it is."""

    namespace: str
    name: str


@dataclass(frozen=True)
class _Request:
    method: str
    path: str
    query: _Query = field(default_factory=list)
    body: Json | None = None
    content_type: str = "application/json"
    timeout: ClientTimeout = ClientTimeout(total=REQUEST_SECONDS)  # noqa: RUF009 - it is frozen


class Api:
    """Requests to the API server. Every method raises ApiException for an answer that it does not expect, and OSError
    when there is none."""

    def __init__(self, client: ApiClient) -> None:
        self._client = client

    async def find(self, kind: str, namespace: str, name: str) -> Json | None:
        """The object; None when there is none."""
        try:
            return await self._json(_Request("GET", _path(kind, namespace, name)))
        except ApiException as error:
            if error.status == 404:
                return None
            raise

    async def each(
        self, kind: str, namespace: str | None, selector: str = "", *, name: str = ""
    ) -> AsyncIterator[Json]:
        """The objects of a kind, page by page, so that only one page is in memory. Without a namespace: those of all
        namespaces. `name`: only the object of that name."""
        query = [("limit", str(PAGE))]
        query += [("labelSelector", selector)] if selector else []
        query += _named(name)
        following: str | None = None
        while following != "":
            page = await self._json(_Request("GET", _path(kind, namespace), [*query, *_continued(following)]))
            following = page["metadata"].get("continue") or ""
            for body in page["items"]:
                yield body

    async def version(self, kind: str, namespace: str | None, selector: str) -> str:
        """The version from which a watch goes on."""
        query = [("labelSelector", selector), ("limit", "1")]
        page = await self._json(_Request("GET", _path(kind, namespace), query))
        return str(page["metadata"]["resourceVersion"])

    async def watch(
        self, kind: str, namespace: str | None, selector: str, version: str, *, name: str = ""
    ) -> AsyncIterator[tuple[str, Json]]:
        """The changes after that version, as (type, object), until the API server ends the watch. Of bookmarks only the
        version counts. `name`: only the object of that name. Raises ApiException as well for an error that the API
        server tells in the stream."""
        query = [("watch", "true"), ("allowWatchBookmarks", "true"), ("timeoutSeconds", str(WATCH_SECONDS))]
        query += [("labelSelector", selector), ("resourceVersion", version), *_named(name)]
        timeout = ClientTimeout(total=None, sock_connect=REQUEST_SECONDS, sock_read=_SILENT_SECONDS)
        answer = await self._send(_Request("GET", _path(kind, namespace), query, timeout=timeout))
        async with answer.response as response:
            async for line in response.content:
                told = json.loads(line)
                if told["type"] == "ERROR":
                    said = told["object"]
                    raise ApiException(status=said.get("code"), reason=said.get("reason"), body=json.dumps(said))
                yield told["type"], told["object"]

    async def apply(self, manifest: Json, subresource: str = "", *, manager: str = FIELD_MANAGER) -> Json:
        """Applies an object (server-side apply): the object as it is now."""
        metadata = manifest["metadata"]
        path = _path(manifest["kind"], metadata["namespace"], metadata["name"], subresource)
        query = [("fieldManager", manager), ("force", "true")]
        return await self._json(_Request("PATCH", path, query, manifest, "application/apply-patch+yaml"))

    async def merge(self, kind: str, namespace: str, name: str, patch: Json) -> None:
        path = _path(kind, namespace, name)
        await self._json(_Request("PATCH", path, [], patch, "application/merge-patch+json"))

    async def ask(self, review: Json) -> Json:
        """Posts an object of the cluster that is only an answer."""
        return await self._json(_Request("POST", _path(review["kind"], None), [], review))

    async def create(self, manifest: Json, *, dry_run: bool = False) -> None:
        """Creates an object. `dry_run`: the API server answers as it would, and stores nothing; and it refuses fields
        that it does not know, which it would drop."""
        query = [("fieldManager", FIELD_MANAGER)]
        query += [("dryRun", "All"), ("fieldValidation", "Strict")] if dry_run else []
        path = _path(kind_of(manifest), manifest["metadata"]["namespace"])
        await self._json(_Request("POST", path, query, manifest))

    async def post(self, manifest: Json) -> None:
        """Creates an object. One of that name that is there already is left as it is."""
        try:
            await self.create(manifest)
        except ApiException as error:
            if not is_taken(error):
                raise

    async def delete(
        self, kind: str, namespace: str, name: str, uid: str = "", grace_seconds: int | None = None
    ) -> None:
        """Deletes an object, and in the background what it owns; no error when the object, or the one of that uid, is
        gone. `grace_seconds`: the grace period of a pod, in place of its own. A deletion that is under way can only be
        made shorter."""
        # All in the body: where there is one, the API server reads no query, and would leave the children of a Job.
        options: Json = {"propagationPolicy": "Background"}
        options |= {"preconditions": {"uid": uid}} if uid else {}
        options |= {} if grace_seconds is None else {"gracePeriodSeconds": grace_seconds}
        try:
            await self._json(_Request("DELETE", _path(kind, namespace, name), [], options))
        except ApiException as error:
            if error.status != 404 and not (uid and error.status == 409):
                raise

    async def log_tail(self, namespace: str, pod: str, container: str, lines: int) -> str:
        query = [("container", container), ("tailLines", str(lines)), ("limitBytes", str(LOG_BYTES))]
        timeout = ClientTimeout(total=LOG_SECONDS)
        data = await self._data(_Request("GET", _path("Pod", namespace, pod, "log"), query, timeout=timeout))
        return data.decode(errors="replace")

    async def _json(self, request: _Request) -> Json:
        answer: Json = json.loads(await self._data(request))
        return answer

    async def _data(self, request: _Request) -> bytes:
        data: bytes = await (await self._send(request)).read()
        return data

    async def _send(self, request: _Request) -> Any:
        """The client's answer, whose body is yet to be read."""
        sent = await self._client.param_serialize(
            request.method,
            request.path,
            query_params=request.query,
            header_params={"Accept": "application/json, */*", "Content-Type": request.content_type},
            body=request.body,
            auth_settings=["BearerToken"],
        )
        code = NO_ANSWER
        try:
            answer = await self._client.call_api(*sent, _request_timeout=request.timeout)
            code = str(answer.status)
        finally:
            API_REQUESTS.labels(verb=request.method, code=code).inc()
        if 200 <= answer.status <= 299:
            return answer
        data: bytes = await answer.read()
        error = ApiException(status=answer.status, reason=answer.reason, body=data.decode(errors="replace"))
        error.headers = getattr(answer, "headers", None)
        raise error


def kind_of(manifest: Json) -> str:
    """The kind of an object as requests name it: with the API version, where several schedulers have such a kind."""
    kind = str(manifest["kind"])
    return f"{kind} {manifest['apiVersion']}" if kind == "PodGroup" else kind


def is_taken(refusal: ApiException) -> bool:
    """Whether the request was refused because an object of that name is there. Other conflicts, such as that of two
    writers of a quota, mean that nothing was made."""
    return bool(status_of(refusal).get("reason") == "AlreadyExists")


def message_of(error: ApiException) -> str:
    """The sentence that the API server sent, or a webhook through it; else the client's own."""
    return clean(str(status_of(error).get("message") or f"{error.status} {error.reason}"))


def status_of(error: ApiException) -> Json:
    """The Status that the API server sent; empty when the answer is another's."""
    try:
        found = json.loads(error.body or "")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _named(name: str) -> _Query:
    return [("fieldSelector", f"metadata.name={name}")] if name else []


def _continued(token: str | None) -> _Query:
    return [("continue", token)] if token else []


def _path(kind: str, namespace: str | None, *rest: str) -> str:
    name, _, version = kind.partition(" ")
    prefix, plural = (f"apis/{version}", f"{name.lower()}s") if version else _COLLECTIONS[kind]
    scope = ["namespaces", namespace] if namespace else []
    return "/" + "/".join([prefix, *(quote(part) for part in [*scope, plural, *rest] if part)])

"""The few requests that the operator makes, as JSON in and JSON out.

The generated models of the client would refuse objects of a newer Kubernetes; only its transport is used.
"""

import json
from typing import Any
from urllib.parse import quote

from kubernetes.aio.client import ApiClient, ApiException
from pseudoreal_api.base import GROUP, PLURAL, VERSION

from pseudoreal_operator.foreign import clean

Json = dict[str, Any]
# Inside the class, `list` is a method.
_Objects = list[Json]
_Query = list[tuple[str, str]]

FIELD_MANAGER = "pseudoreal-operator"
REQUEST_SECONDS = 20.0
LOG_SECONDS = 5.0
"""A kubelet that does not answer must not hold up a pass."""
LOG_BYTES = 2**20
"""A line of a log may be of any length."""

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


class Api:
    """Every method raises ApiException for an answer that it does not expect, and OSError when there is none."""

    def __init__(self, client: ApiClient) -> None:
        self._client = client

    async def find(self, kind: str, namespace: str, name: str) -> Json | None:
        """None when there is no such object."""
        try:
            return await self._json("GET", _path(kind, namespace, name))
        except ApiException as error:
            if error.status == 404:
                return None
            raise

    async def list(self, kind: str, namespace: str | None, selector: str = "") -> _Objects:
        """Without a namespace: in all of them."""
        query = [("labelSelector", selector)] if selector else []
        items: _Objects = (await self._json("GET", _path(kind, namespace), query))["items"]
        return items

    async def apply(self, manifest: Json, subresource: str = "") -> None:
        """Server-side apply."""
        metadata = manifest["metadata"]
        path = _path(manifest["kind"], metadata["namespace"], metadata["name"], subresource)
        query = [("fieldManager", FIELD_MANAGER), ("force", "true")]
        await self._json("PATCH", path, query, manifest, "application/apply-patch+yaml")

    async def merge(self, kind: str, namespace: str, name: str, patch: Json) -> None:
        await self._json("PATCH", _path(kind, namespace, name), [], patch, "application/merge-patch+json")

    async def ask(self, review: Json) -> Json:
        """Posts an object of the cluster that is only an answer."""
        return await self._json("POST", _path(review["kind"], None), [], review)

    async def create(self, manifest: Json, *, dry_run: bool = False) -> None:
        """`dry_run`: the API server answers as it would, and stores nothing."""
        query = [("fieldManager", FIELD_MANAGER), *([("dryRun", "All")] if dry_run else [])]
        await self._json("POST", _path(manifest["kind"], manifest["metadata"]["namespace"]), query, manifest)

    async def post(self, manifest: Json) -> None:
        """Creates an object; one of that name that is there already is left as it is."""
        try:
            await self.create(manifest)
        except ApiException as error:
            if not is_taken(error):
                raise

    async def delete(
        self, kind: str, namespace: str, name: str, uid: str = "", grace_seconds: int | None = None
    ) -> None:
        """In the background, with what the object owns; no error when it, or the one of that uid, is gone.

        `grace_seconds`: of a pod, in place of its own. A deletion that is under way can only be made shorter.
        """
        # All in the body: where there is one, the API server reads no query, and would leave the children of a Job.
        options: Json = {"propagationPolicy": "Background"}
        options |= {"preconditions": {"uid": uid}} if uid else {}
        options |= {} if grace_seconds is None else {"gracePeriodSeconds": grace_seconds}
        try:
            await self._json("DELETE", _path(kind, namespace, name), [], options)
        except ApiException as error:
            if error.status != 404 and not (uid and error.status == 409):
                raise

    async def log_tail(self, namespace: str, pod: str, container: str, lines: int) -> str:
        query = [("container", container), ("tailLines", str(lines)), ("limitBytes", str(LOG_BYTES))]
        data = await self._request("GET", _path("Pod", namespace, pod, "log"), query, timeout=LOG_SECONDS)
        return data.decode(errors="replace")

    async def _json(
        self,
        method: str,
        path: str,
        query: _Query | None = None,
        body: Json | None = None,
        content_type: str = "application/json",
    ) -> Json:
        answer: Json = json.loads(await self._request(method, path, query, body, content_type))
        return answer

    async def _request(
        self,
        method: str,
        path: str,
        query: _Query | None = None,
        body: Json | None = None,
        content_type: str = "application/json",
        timeout: float = REQUEST_SECONDS,
    ) -> bytes:
        headers = {"Accept": "application/json, */*", "Content-Type": content_type}
        request = await self._client.param_serialize(
            method, path, query_params=query or [], header_params=headers, body=body, auth_settings=["BearerToken"]
        )
        response = await self._client.call_api(*request, _request_timeout=timeout)
        data: bytes = await response.read()
        if not 200 <= response.status <= 299:
            raise ApiException(status=response.status, reason=response.reason, body=data.decode(errors="replace"))
        return data


def is_taken(refusal: ApiException) -> bool:
    """Whether an object of that name is there. Other conflicts, such as that of two writers of a quota, mean that
    nothing was made."""
    return bool(_status_of(refusal).get("reason") == "AlreadyExists")


def message_of(error: ApiException) -> str:
    """The API server's sentence, if it sent one; others, such as webhooks, have a say in it."""
    return clean(str(_status_of(error).get("message") or f"{error.status} {error.reason}"))


def _status_of(error: ApiException) -> Json:
    """The Status that the API server sent; empty when the answer is another's."""
    try:
        found = json.loads(error.body or "")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _path(kind: str, namespace: str | None, *rest: str) -> str:
    prefix, plural = _COLLECTIONS[kind]
    scope = ["namespaces", namespace] if namespace else []
    return "/" + "/".join([prefix, *(quote(part) for part in [*scope, plural, *rest] if part)])

"""Requests to a Kubernetes API server, as data: paths, queries, content types. Pure.

The operator sends the requests with asyncio, the command line without. Each limits and decodes the responses itself.
"""

from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import quote

from pseudoreal_api.base import GROUP, KIND, PLURAL, VERSION

Json = dict[str, Any]
Query = tuple[tuple[str, str], ...]

JSON = "application/json"
_MERGE_PATCH = "application/merge-patch+json"
_APPLY_PATCH = "application/apply-patch+yaml"
_METADATA = f"{JSON};as=PartialObjectMetadata;g=meta.k8s.io;v=v1, {JSON}"
_LIST_OF_METADATA = f"{JSON};as=PartialObjectMetadataList;g=meta.k8s.io;v=v1, {JSON}"

COLLECTIONS = {
    "ConfigMap": ("api/v1", "configmaps"),
    "Event": ("api/v1", "events"),
    "Job": ("apis/batch/v1", "jobs"),
    "Lease": ("apis/coordination.k8s.io/v1", "leases"),
    "NetworkPolicy": ("apis/networking.k8s.io/v1", "networkpolicies"),
    "Node": ("api/v1", "nodes"),
    "PersistentVolumeClaim": ("api/v1", "persistentvolumeclaims"),
    "Pod": ("api/v1", "pods"),
    KIND: (f"apis/{GROUP}/{VERSION}", PLURAL),
    "Secret": ("api/v1", "secrets"),
    "Service": ("api/v1", "services"),
    "TokenReview": ("apis/authentication.k8s.io/v1", "tokenreviews"),
}
"""Kind -> prefix of its paths, and its plural."""


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    query: Query = ()
    body: Json | None = None
    content_type: str = JSON
    accept: str = f"{JSON}, */*"

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of `ApiClient.param_serialize`, which the synchronous and the asynchronous client of
        Kubernetes share."""
        return {
            "method": self.method,
            "resource_path": self.path,
            "query_params": [*self.query],
            "header_params": {"Accept": self.accept, "Content-Type": self.content_type},
            "body": self.body,
            "auth_settings": ["BearerToken"],
        }

    def page(self, size: int, following: str | None) -> "Request":
        """Return the request for one page of a list. `following`: continue token of the page before; None: the first
        page."""
        query = (*self.query, ("limit", str(size)), *((("continue", following),) if following else ()))
        return replace(self, query=query)

    def metadata_only(self) -> "Request":
        """Return the request for a response with only the metadata of each object."""
        return replace(self, accept=_METADATA)

    def list_metadata_only(self) -> "Request":
        """Return the request for a list with only the metadata of each object."""
        return replace(self, accept=_LIST_OF_METADATA)


def get(kind: str, namespace: str | None, name: str) -> Request:
    return Request("GET", path_of(kind, namespace, name))


def list_of(kind: str, namespace: str | None, selector: str = "", *, fields: str = "", name: str = "") -> Request:
    """Return the request for all objects of a kind. `namespace`: None: all namespaces. `selector`, `fields`: label and
    field selectors; `name`: only the object of this name."""
    query = [("labelSelector", selector)] if selector else []
    fields = f"metadata.name={name}" if name else fields
    return Request("GET", path_of(kind, namespace), (*query, *([("fieldSelector", fields)] if fields else [])))


def watch(kind: str, namespace: str | None, selector: str, version: str, seconds: int, *, name: str = "") -> Request:
    """Return the request for the changes after `version`, with bookmarks. The API server ends the watch after
    `seconds`."""
    query = [("watch", "true"), ("allowWatchBookmarks", "true"), ("timeoutSeconds", str(seconds))]
    query += [("labelSelector", selector), ("resourceVersion", version)]
    query += [("fieldSelector", f"metadata.name={name}")] if name else []
    return Request("GET", path_of(kind, namespace), tuple(query))


def create(kind: str, namespace: str, body: Json, manager: str, *, strict: bool, dry_run: bool) -> Request:
    """Return the request to create an object. `dry_run`: the API server validates the object and stores nothing.
    `strict`: the API server rejects unknown fields instead of dropping them."""
    query = [("fieldManager", manager)]
    query += [("dryRun", "All")] if dry_run else []
    query += [("fieldValidation", "Strict")] if strict else []
    return Request("POST", path_of(kind, namespace), tuple(query), body)


def apply(manifest: Json, subresource: str, manager: str) -> Request:
    """Return the request of a server-side apply that takes over fields of other managers."""
    metadata = manifest["metadata"]
    path = path_of(manifest["kind"], metadata["namespace"], metadata["name"], subresource)
    return Request("PATCH", path, (("fieldManager", manager), ("force", "true")), manifest, _APPLY_PATCH)


def merge_patch(kind: str, namespace: str, name: str, patch: Json, manager: str = "") -> Request:
    query: Query = (("fieldManager", manager),) if manager else ()
    return Request("PATCH", path_of(kind, namespace, name), query, patch, _MERGE_PATCH)


def delete(kind: str, namespace: str, name: str, uid: str = "", grace_seconds: int | None = None) -> Request:
    """Return the request to delete an object and, in the background, all objects that it owns. `uid`: only the object
    with this uid. `grace_seconds`: grace period of a pod; None: the period in its spec."""
    # All options are in the body: with a body, the API server ignores the query. A propagation policy in the query
    # would be lost, and the children of a Job would stay.
    options: Json = {"propagationPolicy": "Background"}
    options |= {"preconditions": {"uid": uid}} if uid else {}
    options |= {} if grace_seconds is None else {"gracePeriodSeconds": grace_seconds}
    return Request("DELETE", path_of(kind, namespace, name), (), options)


def log(namespace: str, pod: str, container: str, **options: str) -> Request:
    """Return the request for the log of a container. `options`: further parameters of the query, such as tailLines."""
    return Request("GET", path_of("Pod", namespace, pod, "log"), (("container", container), *options.items()))


def review(body: Json) -> Request:
    """Return the request to create a cluster-scoped review, such as a TokenReview. The API server stores no reviews."""
    return Request("POST", path_of(body["kind"], None), (), body)


def plural_of(kind: str) -> str:
    return COLLECTIONS[kind][1]


def path_of(kind: str, namespace: str | None, *rest: str) -> str:
    """Return the path of a collection, or of an object in a collection. `kind`: a key of COLLECTIONS; for a kind that
    several projects define, kind and API version, such as "PodGroup scheduling.x-k8s.io/v1alpha1". `namespace`: None:
    all namespaces. `rest`: name and subresource; empty parts are left out."""
    name, _, version = kind.partition(" ")
    prefix, plural = (f"apis/{version}", f"{name.lower()}s") if version else COLLECTIONS[kind]
    scope = ["namespaces", namespace] if namespace else []
    return "/" + "/".join([prefix, *(quote(part, safe="") for part in [*scope, plural, *rest] if part)])

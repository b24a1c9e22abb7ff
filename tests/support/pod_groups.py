"""PodGroup kinds of Kubernetes and of third-party schedulers, after their documentation: as CustomResourceDefinitions
for an API server, and as schemas.

Each has the `spec` fields of all releases with its API version.
"""

from typing import Any

from kubernetes import client

from tests.support.patience import wait_for

Json = dict[str, Any]

_TEXT: Json = {"type": "string"}
_NUMBER: Json = {"type": "integer", "format": "int32"}
_AMOUNTS: Json = {"type": "object", "additionalProperties": {"x-kubernetes-int-or-string": True}}
_TIERS: Json = {
    "type": "object",
    "properties": {
        "mode": {"type": "string", "enum": ["hard", "soft"]},
        "highestTierAllowed": _NUMBER,
        "highestTierName": _TEXT | {"maxLength": 253},
    },
}

SPECS: dict[str, Json] = {
    # sigs.k8s.io/scheduler-plugins, apis/scheduling/v1alpha1, PodGroupSpec
    "scheduling.x-k8s.io/v1alpha1": {
        "minMember": _NUMBER | {"minimum": 1},
        "minResources": _AMOUNTS,
        "scheduleTimeoutSeconds": _NUMBER,
    },
    # volcano.sh/apis, scheduling/v1beta1, PodGroupSpec
    "scheduling.volcano.sh/v1beta1": {
        "minMember": _NUMBER,
        "minTaskMember": {"type": "object", "additionalProperties": _NUMBER},
        "minResources": _AMOUNTS,
        "queue": _TEXT,
        "priorityClassName": _TEXT,
        "networkTopology": _TIERS,
    },
    # k8s.io/api, scheduling/v1beta1, PodGroupSpec, of Kubernetes 1.37
    "scheduling.k8s.io/v1beta1": {
        "priorityClassName": _TEXT,
        "schedulingPolicy": {
            "type": "object",
            "properties": {"gang": {"type": "object", "properties": {"minCount": _NUMBER}, "required": ["minCount"]}},
        },
    },
}
"""API version -> schemas of the fields of spec."""


def definition(api_version: str) -> Json:
    """Return the CustomResourceDefinition of PodGroups of the API version."""
    group, _, version = api_version.partition("/")
    spec = {"type": "object", "properties": SPECS[api_version]}
    status = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    schema = {"type": "object", "properties": {"spec": spec, "status": status}}
    names = {"kind": "PodGroup", "listKind": "PodGroupList", "plural": "podgroups", "singular": "podgroup"}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"podgroups.{group}",
            # Definitions in groups below k8s.io must state whether Kubernetes has approved them.
            "annotations": {"api-approved.kubernetes.io": "unapproved, for tests"},
        },
        "spec": {
            "group": group,
            "scope": "Namespaced",
            "names": names,
            "versions": [{"name": version, "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}],
        },
    }


def define(api: client.ApiClient, api_version: str) -> None:
    """Make the API server serve PodGroups of the API version."""
    body: Any = definition(api_version)
    client.ApiextensionsV1Api(api).create_custom_resource_definition(body)
    wait_for(f"PodGroups of {api_version}", lambda: is_served(api, api_version))


def is_served(api: client.ApiClient, api_version: str) -> bool:
    group, _, version = api_version.partition("/")
    try:
        client.CustomObjectsApi(api).list_cluster_custom_object(group, version, "podgroups")
    except client.ApiException as error:
        if error.status == 404:
            return False
        raise
    return True

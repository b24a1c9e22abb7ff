"""Structural schemas of the Kubernetes core/v1 types in a PseudoRealJob, with a size limit for every list and map.

core_types.py has the types as an API server publishes them. The limits keep an object cheap to read: a tenant could
fill an object of 1.5 MB with lists of empty entries, and each entry costs a reader a few hundred bytes. Strings have no
limit besides the size of the object, because their cost is their length.
"""

from typing import Any

from pseudoreal_api.spec.core_types import TYPES

Json = dict[str, Any]

EMBEDDED = "x-embedded"
"""Key that marks the schema of a field as already structural."""
MOST_ITEMS = 64
"""Maximum number of items of a list, or entries of a map, unless `_MOST` has another limit."""
_MOST = {
    "args": 512,
    "command": 512,
    "containers": 16,
    "env": 512,
    "initContainers": 16,
    "items": 256,
    "labels": 128,
    "annotations": 128,
    "topologySpreadConstraints": 16,
    "values": 512,
    "volumes": 128,
    "volumeMounts": 128,
}
"""Maximum number of items or entries, by field name. `values` belong to expressions of a node affinity and may list
node names."""
_QUANTITY_CHARACTERS = 64

_OVERLAID = ("Container", "PodSecurityContext", "PodSpec", "ResourceRequirements", "SecurityContext")
"""Types with fields set by the operator: in an overlay, null removes such a field."""
_COMPLETED = {"ContainerPort": "containerPort", "PodSpec": "containers", "VolumeMount": "name"}
"""core/v1 type -> its required field that is optional in an overlay: overlay entries are merged by other keys."""


def embedded(name: str, *, without: str | None = None) -> Json:
    """Return the schema of a field of a core/v1 type: its properties and required fields. `without` is a property to
    omit."""
    schema = _schema(name)
    required = [field for field in schema.get("required", []) if field != without]
    properties = {field: node for field, node in schema["properties"].items() if field != without}
    return {EMBEDDED: name, "properties": properties} | ({"required": required} if required else {})


def _schema(name: str) -> Json:
    """Return the schema of a type, with all referenced types inlined."""
    found = TYPES[name]
    optional = _COMPLETED.get(name)
    required = [field for field in found.get("required", []) if field != optional]
    out: Json = {"type": "object"} | ({"required": required} if required else {})
    properties = {field: _node(field, node) for field, node in found["properties"].items()}
    if name in _OVERLAID:
        properties = {f: node if f in required else node | {"nullable": True} for f, node in properties.items()}
    return out | {"properties": properties}


def _node(field: str, node: Json) -> Json:
    if "$ref" in node:
        if node["$ref"] in ("Quantity", "IntOrString"):
            return {"x-kubernetes-int-or-string": True, "maxLength": _QUANTITY_CHARACTERS}
        return _schema(node["$ref"])
    if node["type"] == "array":
        return {"type": "array", "maxItems": _MOST.get(field, MOST_ITEMS), "items": _node("", node["items"])}
    if "additionalProperties" in node:
        most, entry = _MOST.get(field, MOST_ITEMS), _node("", node["additionalProperties"])
        return {"type": "object", "maxProperties": most, "additionalProperties": entry}
    return {"type": node["type"]}


POD_TEMPLATE = embedded("PodTemplateSpec")
VOLUME_SOURCE = embedded("Volume", without="name")
VALUE_SOURCE = embedded("EnvVarSource")
CLAIM_SPEC = embedded("PersistentVolumeClaimSpec")

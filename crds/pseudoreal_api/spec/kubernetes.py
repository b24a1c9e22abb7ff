"""Types of Kubernetes' core/v1 inside a PseudoRealJob, as structural schemas, with a bound for every list and map.

core_types.py has the types as an API server publishes them.
The bounds keep one object cheap to read: a tenant may fill an object of 1.5 MB with lists of empty entries, and each
entry costs a reader some hundred bytes. Texts have none but the size of the object: they cost what they are long.
"""

from typing import Any

from pseudoreal_api.spec.core_types import TYPES

Json = dict[str, Any]

EMBEDDED = "x-embedded"
"""Marks the schema of a field that is structural already."""
MOST_ITEMS = 64
"""Most items of a list and most entries of a map, where `_MOST` says nothing else."""
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
"""Most items or entries by the field's name. `values`: of a node affinity's expression, where names of nodes stand."""
_QUANTITY_CHARACTERS = 64

_OVERLAID = ("Container", "PodSecurityContext", "PodSpec", "ResourceRequirements", "SecurityContext")
"""Types whose fields the operator sets: in an overlay, null takes such a field away."""
_COMPLETED = {"ContainerPort": "containerPort", "PodSpec": "containers", "VolumeMount": "name"}
"""Fields that an overlay may leave out though core/v1 requires them: entries are merged by other keys."""


def embedded(name: str, *, without: str | None = None) -> Json:
    """Return what a field's schema says of a type of core/v1: its properties, and which are required. `without`: a
    property that the field does not have."""
    schema = _schema(name)
    required = [field for field in schema.get("required", []) if field != without]
    properties = {field: node for field, node in schema["properties"].items() if field != without}
    return {EMBEDDED: name, "properties": properties} | ({"required": required} if required else {})


def _schema(name: str) -> Json:
    """Return the schema of a type, with all types that it refers to in place."""
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

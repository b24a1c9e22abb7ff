"""Writes crds/pseudoreal_api/spec/core_types.py: the types of core/v1 that a PseudoRealJob embeds, without their
descriptions."""

import json
from pathlib import Path
from typing import Any

import kubernetes_validate

from pseudoreal_dev.machine import paths

Json = dict[str, Any]

FILE = paths.REPOSITORY / "crds" / "pseudoreal_api" / "spec" / "core_types.py"

VERSION = "1.37"
"""The newest release of Kubernetes that kubernetes-validate knows. Each release only adds fields, so a cluster of an
older one is served as well: its API server refuses what it does not know when the job is tried on it."""
ROOTS = ("PodTemplateSpec", "Volume", "EnvVarSource", "PersistentVolumeClaimSpec")
LEFT_OUT = {
    # A template cannot have them.
    "PodSpec": {"ephemeralContainers"},
    # The trainer runs on Linux.
    "PodSecurityContext": {"windowsOptions"},
    "SecurityContext": {"windowsOptions"},
    # Their drivers were taken out of Kubernetes before 1.30, the oldest release that the operator runs on. That of
    # gitRepo let a tenant run commands on the node, and is switched off.
    "Volume": {"flocker", "gitRepo", "glusterfs", "photonPersistentDisk", "quobyte", "scaleIO", "storageos"},
    # Of the metadata of a template the pods get nothing else.
    "ObjectMeta": {
        "creationTimestamp",
        "deletionGracePeriodSeconds",
        "deletionTimestamp",
        "finalizers",
        "generateName",
        "generation",
        "managedFields",
        "name",
        "namespace",
        "ownerReferences",
        "resourceVersion",
        "selfLink",
        "uid",
    },
}
"""Fields that a PseudoRealJob cannot have, by type."""
_HEAD = f'''"""Types of core/v1 in a PseudoRealJob, as Kubernetes {VERSION} publishes them, without descriptions.

Written by `make generate`; do not edit.
"""

# ruff: noqa: E501
from typing import Any

# fmt: off
TYPES: dict[str, dict[str, Any]] = {{
'''
_SCALARS = {"Quantity", "IntOrString"}
_KEPT = ("type", "required")


def types(definitions: Json, roots: tuple[str, ...] = ROOTS) -> dict[str, Json]:
    """Return the roots and the types that they refer to, by their short names. `definitions`: schemas of an OpenAPI
    document by their full names."""
    named = {name.rpartition(".")[2]: schema for name, schema in definitions.items() if _is_core(name)}
    found: dict[str, Json] = {}
    waiting = [*roots]
    while waiting:
        name = waiting.pop()
        if name not in found and name not in _SCALARS:
            found[name] = _type(name, named[name])
            waiting += _references(found[name])
    return dict(sorted(found.items()))


def _is_core(name: str) -> bool:
    return name.startswith(("io.k8s.api.core.v1.", "io.k8s.apimachinery.pkg."))


def _type(name: str, schema: Json) -> Json:
    out = _node(schema)
    left_out = LEFT_OUT.get(name, set())
    fields = out.get("properties", {})
    assert left_out <= fields.keys(), f"{name} has no {left_out - fields.keys()}"
    return out | {"properties": {field: fields[field] for field in sorted(fields.keys() - left_out)}}


def _node(schema: Json) -> Json:
    reference = schema.get("$ref") or next((part["$ref"] for part in schema.get("allOf", [])), None)
    if reference:
        return {"$ref": reference.rpartition(".")[2]}
    out = {key: schema[key] for key in _KEPT if key in schema}
    if isinstance(out.get("type"), list):
        (out["type"],) = [kind for kind in out["type"] if kind != "null"]
    if "properties" in schema:
        out["properties"] = {field: _node(node) for field, node in schema["properties"].items()}
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            out[key] = _node(schema[key])
    return out


def _references(node: Any) -> list[str]:
    if isinstance(node, dict):
        own = [node["$ref"]] if isinstance(node.get("$ref"), str) else []
        return own + [name for child in node.values() for name in _references(child)]
    return []


def to_python() -> str:
    folder = Path(kubernetes_validate.__file__).parent / "kubernetes-json-schema" / f"v{VERSION}.0-local"
    definitions = json.loads((folder / "_definitions.json").read_text())["$defs"]
    lines = [f"{json.dumps(name)}: {json.dumps(schema)},\n" for name, schema in types(definitions).items()]
    return _HEAD + "".join(lines) + "}\n"


if __name__ == "__main__":
    FILE.write_text(to_python())

"""Generates crds/pseudoreal_api/spec/core_types.py: the core/v1 types embedded in a PseudoRealJob, without
descriptions."""

import json
from pathlib import Path
from typing import Any

import kubernetes_validate

from pseudoreal_dev.machine import paths

Json = dict[str, Any]

FILE = paths.REPOSITORY / "crds" / "pseudoreal_api" / "spec" / "core_types.py"

VERSION = "1.37"
"""Newest Kubernetes release in kubernetes-validate. Releases only add fields, so the types cover older clusters too: an
older API server rejects newer fields in the operator's dry run of the job."""
ROOTS = ("PodTemplateSpec", "Volume", "EnvVarSource", "PersistentVolumeClaimSpec")
LEFT_OUT = {
    # Not allowed in a template.
    "PodSpec": {"ephemeralContainers"},
    # The trainer runs on Linux.
    "PodSecurityContext": {"windowsOptions"},
    "SecurityContext": {"windowsOptions"},
    # Drivers removed before Kubernetes 1.30, the oldest release that the operator supports; and the gitRepo driver, now
    # disabled because it let a tenant run commands on the node.
    "Volume": {"flocker", "gitRepo", "glusterfs", "photonPersistentDisk", "quobyte", "scaleIO", "storageos"},
    # Of a template's metadata, a job can set only labels and annotations.
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
"""Type -> its fields that cannot be used in a PseudoRealJob."""
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
    """Return the root types and all types reachable from them, by short name. `definitions` are the schemas of an
    OpenAPI document, by full name."""
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
    assert left_out <= fields.keys(), f"LEFT_OUT names only fields of {name}, not {left_out - fields.keys()}"
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

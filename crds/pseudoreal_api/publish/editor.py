"""Generates the JSON schema of a PseudoRealJob for editors: `python -m pseudoreal_api.publish.editor FILE`.

The schema of the CustomResourceDefinition becomes one of JSON Schema (draft 7), which editors read. Rules across fields
are left out, because they are CEL. Unknown fields are faults, as for `kubectl apply` with strict validation.
"""

import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pseudoreal_api.base import API_VERSION, KIND
from pseudoreal_api.publish.crd import custom_resource_definition

Json = dict[str, Any]

FILE_NAME = f"{KIND.lower()}.schema.json"
_SHARED_CHARACTERS = 100
"""Minimum number of characters of a part of the schema that is written once although it stands in several places."""
_TEXTS: Json = {"type": "object", "additionalProperties": {"type": "string"}}


def editor_schema() -> Json:
    """Return the schema; parts that repeat are in `definitions`."""
    (version,) = custom_resource_definition()["spec"]["versions"]
    job = version["schema"]["openAPIV3Schema"]
    spec, definitions = _share(_convert(job["properties"]["spec"]))
    name = {"type": "string", "description": "name is the name of the job, and the start of the names of its pods."}
    metadata = {
        "type": "object",
        "anyOf": [{"required": ["name"]}, {"required": ["generateName"]}],
        "properties": {"name": name, "generateName": {"type": "string"}, "namespace": {"type": "string"}}
        | {"labels": _TEXTS, "annotations": _TEXTS},
    }
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": KIND,
        "description": job["description"],
        "type": "object",
        "required": ["apiVersion", "kind", "metadata", "spec"],
        "additionalProperties": False,
        "properties": {
            "apiVersion": {"const": API_VERSION},
            "kind": {"const": KIND},
            "metadata": metadata,
            "spec": spec,
            "status": {"type": "object", "description": "status is written by the operator."},
        },
        "definitions": definitions,
    }


def _convert(node: Json) -> Json:
    out = {key: value for key, value in node.items() if not key.startswith("x-kubernetes-") and key != "nullable"}
    out.pop("format", None)  # of integers alone, and JSON Schema has no int64
    if node.get("x-kubernetes-int-or-string"):
        text = {"type": "string"} | {key: out.pop(key) for key in ("pattern", "maxLength") if key in out}
        number = {"type": "integer"} | {key: out.pop(key) for key in ("minimum", "maximum") if key in out}
        out |= {"anyOf": [number, text]}
    if "properties" in node:
        out["additionalProperties"] = False
    if node.get("nullable") and "type" in out:
        out["type"] = [out["type"], "null"]
    return _with_children(out, "", lambda child, _: _convert(child))


def _share(schema: Json) -> tuple[Json, Json]:
    """Return the schema with references in place of the parts that repeat, and those parts by name."""
    times = Counter[str]()
    names: dict[str, str] = {}
    definitions: Json = {}

    def counted(node: Json, name: str) -> Json:
        times[json.dumps(node, sort_keys=True)] += 1
        return _with_children(node, name, counted)

    def shared(node: Json, name: str) -> Json:
        text, made = json.dumps(node, sort_keys=True), _with_children(node, name, shared)
        if times[text] == 1 or len(text) < _SHARED_CHARACTERS:
            return made
        if text not in names:
            number = sum(known.partition(".")[0] == name for known in names.values())
            names[text] = f"{name}.{number + 1}" if number else name
            definitions[names[text]] = made
        return {"$ref": f"#/definitions/{names[text]}"}

    counted(schema, "spec")
    whole = shared(schema, "spec")
    return whole, dict(sorted(definitions.items()))


def _with_children(node: Json, name: str, build: Callable[[Json, str], Json]) -> Json:
    """Return the node with each child replaced by the result of `build`. `name`: name of the node's field; items of a
    list and values of a map have the same name."""
    out = dict(node)
    if "properties" in node:
        out["properties"] = {child: build(value, child) for child, value in node["properties"].items()}
    for key in ("items", "additionalProperties"):
        if isinstance(node.get(key), dict):
            out[key] = build(node[key], name)
    return out


def to_json() -> str:
    return json.dumps(editor_schema(), separators=(",", ":")) + "\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(to_json())

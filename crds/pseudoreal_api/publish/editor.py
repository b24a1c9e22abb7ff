"""Generates the JSON schema of a PseudoRealJob for editors: `python -m pseudoreal_api.publish.editor FILE`.

It is the schema of the CustomResourceDefinition in the words of JSON Schema (draft 7), which editors read, without the
rules across fields: those are CEL. Unknown fields are faults, as for `kubectl apply` with strict validation.
"""

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pseudoreal_api.base import API_VERSION, KIND
from pseudoreal_api.publish.crd import custom_resource_definition

Json = dict[str, Any]

FILE_NAME = f"{KIND.lower()}.schema.json"
_SHARED_CHARACTERS = 100
"""Length from which a part of the schema that stands in several places is written once."""
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
        out["properties"] = {name: _convert(child) for name, child in node["properties"].items()}
        out["additionalProperties"] = False
    elif isinstance(node.get("additionalProperties"), dict):
        out["additionalProperties"] = _convert(node["additionalProperties"])
    if "items" in node:
        out["items"] = _convert(node["items"])
    if node.get("nullable") and "type" in out:
        out["type"] = [out["type"], "null"]
    return out


def _share(schema: Json) -> tuple[Json, Json]:
    """Return the schema with references in place of the parts that repeat, and those parts by name."""
    times = Counter(map(_text, _parts(schema, "")))
    names: dict[str, str] = {}
    definitions: Json = {}

    def shared(node: Json, name: str) -> Json:
        text, made = _text((node, name)), _rebuilt(node, name, shared)
        if times[text] == 1 or len(text) < _SHARED_CHARACTERS:
            return made
        if text not in names:
            number = sum(known.partition(".")[0] == name for known in names.values())
            names[text] = f"{name}.{number + 1}" if number else name
            definitions[names[text]] = made
        return {"$ref": f"#/definitions/{names[text]}"}

    whole = shared(schema, "spec")
    return whole, dict(sorted(definitions.items()))


def _text(part: tuple[Json, str]) -> str:
    return json.dumps(part[0], sort_keys=True)


def _parts(node: Json, name: str) -> Iterator[tuple[Json, str]]:
    """Yield the schema of the node and of everything in it, each with the name of its field."""
    yield node, name
    for child_name, child in _children(node, name):
        yield from _parts(child, child_name)


def _children(node: Json, name: str) -> Iterator[tuple[str, Json]]:
    yield from node.get("properties", {}).items()
    yield from ((name, node[key]) for key in ("items", "additionalProperties") if isinstance(node.get(key), dict))


def _rebuilt(node: Json, name: str, build: Callable[[Json, str], Json]) -> Json:
    """Return the node with its children built anew."""
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

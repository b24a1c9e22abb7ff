"""Converts a pydantic model into a structural OpenAPI schema, the form required by a CustomResourceDefinition."""

from typing import Any

from pydantic import BaseModel

from pseudoreal_api.spec.kubernetes import EMBEDDED

_DROPPED = ("title", "additionalProperties")


def structural_schema(model: type[BaseModel]) -> dict[str, Any]:
    """Return the schema without references, titles and unions; Kubernetes itself prunes unknown fields.

    Raises ValueError for a construct impossible in a structural schema.
    """
    schema = model.model_json_schema(by_alias=True)
    return _convert(schema, schema.get("$defs", {}))


def _convert(node: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    node = _without_null(_inline(node, definitions), definitions)
    if EMBEDDED in node:
        return {k: v for k, v in node.items() if k not in (*_DROPPED, EMBEDDED)}
    if node.get("x-kubernetes-int-or-string"):
        kept = {k: v for k, v in node.items() if k not in (*_DROPPED, "anyOf")}
        return {k: v for k, v in kept.items() if not (k == "default" and v is None)}
    out = {k: v for k, v in node.items() if k not in _DROPPED and k != "$defs"}
    if "properties" in node:
        out["properties"] = {k: _convert(v, definitions) for k, v in node["properties"].items()}
    elif isinstance(node.get("additionalProperties"), dict):
        out["additionalProperties"] = _convert(node["additionalProperties"], definitions)
    if "items" in node:
        out["items"] = _convert(node["items"], definitions)
    return _with_defaults(out)


def _inline(node: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    if "$ref" not in node:
        return node
    target = definitions[node["$ref"].rsplit("/", 1)[1]]
    return {**target, **{k: v for k, v in node.items() if k != "$ref"}}


def _without_null(node: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    if "anyOf" not in node or node.get("x-kubernetes-int-or-string"):
        return node
    choices = [c for c in node["anyOf"] if c.get("type") != "null"]
    if len(choices) != 1:
        raise ValueError(f"a structural schema has no unions, but found {node['anyOf']}")
    rest = {k: v for k, v in node.items() if k != "anyOf" and not (k == "default" and v is None)}
    return {**_inline(choices[0], definitions), **rest}


def _with_defaults(node: dict[str, Any]) -> dict[str, Any]:
    if node.get("type") == "integer":
        node["format"] = "int64"
    # The fields of an object have their own defaults; repeating the defaults here would make two places to change.
    if node.get("type") == "object" and "default" in node:
        node["default"] = {}
    if "const" in node:
        node["enum"] = [node.pop("const")]
    return node

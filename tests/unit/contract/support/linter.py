"""Conventions of Kubernetes APIs, as rules on one version of a CustomResourceDefinition.

The rules are those of kube-api-linter (kubernetes-sigs) and have its names. kube-api-linter reads Go types; these rules
read the schema, so only rules that apply to a schema are here. Each rule yields the paths of the fields that violate
it.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]
Rule = Callable[[Json], Iterator[str]]

RULES: dict[str, Rule] = {}


def rule(check: Rule) -> Rule:
    RULES[check.__name__] = check
    return check


@dataclass(frozen=True)
class Field:
    """A field, the items of a list (`path` ends in []) or the values of a map (`path` ends in {})."""

    path: str
    schema: Json
    required: bool = False

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]

    @property
    def is_named(self) -> bool:
        return not self.name.endswith(("[]", "{}"))

    @property
    def in_spec(self) -> bool:
        return self.path.startswith("spec.")


EMBEDDED = (
    "pod.template",
    "env[].valueFrom",
    "volume.claimTemplate.spec",
    "data.volume",
    "huggingFace.volume",
    "offload.volume",
)
"""Suffixes of paths whose type is from core/v1; their own fields follow Kubernetes' conventions already."""


def is_embedded(path: str) -> bool:
    return path.endswith(EMBEDDED)


def _below(path: str, schema: Json) -> Iterator[Field]:
    if is_embedded(path):
        return
    for name, child in schema.get("properties", {}).items():
        yield from _from(Field(f"{path}.{name}", child, name in schema.get("required", [])))
    if "items" in schema:
        yield from _from(Field(f"{path}[]", schema["items"]))
    if isinstance(schema.get("additionalProperties"), dict):
        yield from _from(Field(f"{path}{{}}", schema["additionalProperties"]))


def _from(field: Field) -> Iterator[Field]:
    yield field
    yield from _below(field.path, field.schema)


def fields(version: Json) -> Iterator[Field]:
    """Yield all fields of spec and status, including these two; metadata, apiVersion and kind belong to Kubernetes."""
    for name in ("spec", "status"):
        if name in _root(version)["properties"]:
            yield from _from(Field(name, _root(version)["properties"][name]))


def named(version: Json) -> Iterator[Field]:
    return (field for field in fields(version) if field.is_named)


def _root(version: Json) -> Json:
    root: Json = version["schema"]["openAPIV3Schema"]
    return root


def _is_list(schema: Json) -> bool:
    return schema.get("type") == "array"


def _is_string(schema: Json) -> bool:
    """Return whether the schema is a string without listed values and without a format."""
    return schema.get("type") == "string" and not {"enum", "format"} & schema.keys()


def _is_time(schema: Json) -> bool:
    return schema.get("format") == "date-time"


@rule
def arrayofstruct(version: Json) -> Iterator[str]:
    """Items of a list have a required field that tells them apart."""
    for field in fields(version):
        items = field.schema.get("items", {})
        if "properties" in items and not items.get("required"):
            yield field.path


@rule
def commentstart(version: Json) -> Iterator[str]:
    """A description is a sentence that starts with the field's name, as printed by `kubectl explain`."""
    for field in named(version):
        text = field.schema.get("description", "")
        is_root = field.path in ("spec", "status")
        if not is_root and not (text.startswith(f"{field.name} ") and text.endswith(".")):
            yield field.path


_CONDITION: dict[str, Json] = {
    "type": {"type": "string", "maxLength": 316},
    "status": {"type": "string", "enum": ["True", "False", "Unknown"]},
    "reason": {"type": "string", "maxLength": 1024, "pattern": "^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$"},
    "message": {"type": "string", "maxLength": 32768},
    "lastTransitionTime": {"type": "string", "format": "date-time"},
    "observedGeneration": {"type": "integer", "format": "int64"},
}


@rule
def conditions(version: Json) -> Iterator[str]:
    """`conditions` is the first field of the status, and a map by type with the shape of metav1.Condition."""
    status = _root(version)["properties"]["status"]["properties"]
    found = status.get("conditions", {})
    items = found.get("items", {}).get("properties", {})
    shaped = all(_CONDITION[name].items() <= items.get(name, {}).items() for name in _CONDITION)
    if next(iter(status)) != "conditions" or found.get("x-kubernetes-list-map-keys") != ["type"] or not shaped:
        yield "status.conditions"


@rule
def conflictingmarkers(version: Json) -> Iterator[str]:
    """An int-or-string field has no type; listed values have no pattern."""
    for field in fields(version):
        both = field.schema.get("x-kubernetes-int-or-string") and "type" in field.schema
        if both or {"enum", "pattern"} <= field.schema.keys():
            yield field.path


@rule
def defaultorrequired(version: Json) -> Iterator[str]:
    """A required field has no default."""
    return (field.path for field in fields(version) if field.required and "default" in field.schema)


_DEPENDENT = {
    ("x-kubernetes-list-type", "map"): "x-kubernetes-list-map-keys",
    ("x-kubernetes-int-or-string", True): "pattern",
    ("x-kubernetes-preserve-unknown-fields", True): "type",
}


@rule
def dependenttags(version: Json) -> Iterator[str]:
    """Some markers need another one: a map needs its keys, an int-or-string its pattern."""
    for field in fields(version):
        for (mark, value), other in _DEPENDENT.items():
            if field.schema.get(mark) == value and other not in field.schema:
                yield field.path


@rule
def duplicatemarkers(version: Json) -> Iterator[str]:
    """Enumerations, lists of required fields and rules have no duplicates."""
    for field in fields(version):
        lists = [field.schema.get(key, []) for key in ("enum", "required", "x-kubernetes-list-map-keys")]
        lists.append([validation["rule"] for validation in field.schema.get("x-kubernetes-validations", [])])
        if any(len(found) != len(set(found)) for found in lists):
            yield field.path


@rule
def enums(version: Json) -> Iterator[str]:
    """Values of enumerations are CamelCase (API conventions, "Constants"); a leading digit is allowed, as in 1F1B."""
    for field in fields(version):
        if not all(re.fullmatch("[A-Z0-9][A-Za-z0-9]*", str(value)) for value in field.schema.get("enum", [])):
            yield field.path


@rule
def integers(version: Json) -> Iterator[str]:
    """Integers have the format int32 or int64."""
    for field in fields(version):
        if field.schema.get("type") == "integer" and field.schema.get("format") not in ("int32", "int64"):
            yield field.path


@rule
def jsontags(version: Json) -> Iterator[str]:
    """Field names are camelCase."""
    return (f.path for f in named(version) if not re.fullmatch("[a-z][a-z0-9]*(?:[A-Z][a-z0-9]*)*", f.name))


@rule
def maxlength(version: Json) -> Iterator[str]:
    """Strings and lists are bounded; the cost estimates of validation rules depend on the bounds."""
    for field in fields(version):
        unbounded_string = _is_string(field.schema) and "maxLength" not in field.schema
        if unbounded_string or (_is_list(field.schema) and "maxItems" not in field.schema):
            yield field.path


@rule
def minlength(version: Json) -> Iterator[str]:
    """A string written by users is not empty: leaving the field out is the only way to say nothing."""
    for field in fields(version):
        pattern = field.schema.get("pattern")
        refuses = field.schema.get("minLength", 0) > 0 or (pattern and not re.search(pattern, ""))
        if field.in_spec and _is_string(field.schema) and not refuses:
            yield field.path


@rule
def nobools(version: Json) -> Iterator[str]:
    """There are no booleans, because they cannot be extended."""
    return (field.path for field in fields(version) if field.schema.get("type") == "boolean")


@rule
def nodurations(version: Json) -> Iterator[str]:
    """A duration is an integer whose name ends in its unit."""
    for field in named(version):
        names_none = "enum" not in field.schema and re.search("(?i)(timeout|duration|period|interval)$", field.name)
        is_text = field.name.endswith("Seconds") and field.schema.get("type") != "integer"
        if field.schema.get("format") == "duration" or names_none or is_text:
            yield field.path


@rule
def nofloats(version: Json) -> Iterator[str]:
    """There are no floats, because some clients change them."""
    return (field.path for field in fields(version) if field.schema.get("type") == "number")


@rule
def nomaps(version: Json) -> Iterator[str]:
    """There are lists of named objects in place of maps."""
    return (field.path for field in fields(version) if "additionalProperties" in field.schema)


@rule
def nonullable(version: Json) -> Iterator[str]:
    """No field is nullable; a field is left out instead."""
    return (field.path for field in fields(version) if field.schema.get("nullable"))


@rule
def nophase(version: Json) -> Iterator[str]:
    """No field is the phase of a state machine; conditions say more."""
    return (field.path for field in named(version) if "phase" in field.name.lower())


@rule
def noreferences(version: Json) -> Iterator[str]:
    """The name of a field that names an object ends in Name or Ref."""
    return (field.path for field in named(version) if re.search("(?i)references?", field.name))


@rule
def notimestamp(version: Json) -> Iterator[str]:
    """The name of a time field ends in Time."""
    for field in named(version):
        if "stamp" in field.name.lower() or (_is_time(field.schema) and not field.name.lower().endswith("time")):
            yield field.path


@rule
def optionalfields(version: Json) -> Iterator[str]:
    """A field that users may leave out has a default, or describes the effect of leaving it out."""
    for field in named(version):
        says = re.search("Omitted\\b|instead of", field.schema.get("description", ""))
        if field.in_spec and not field.required and "default" not in field.schema and not says:
            yield field.path


@rule
def optionalorrequired(version: Json) -> Iterator[str]:
    """Required fields exist."""
    for field in fields(version):
        if not set(field.schema.get("required", [])) <= field.schema.get("properties", {}).keys():
            yield field.path


@rule
def requiredfields(version: Json) -> Iterator[str]:
    """A required string cannot be empty."""
    for field in named(version):
        length = field.schema.get("minLength", 0)
        pattern = field.schema.get("pattern")
        if field.in_spec and field.required and _is_string(field.schema) and not length and not pattern:
            yield field.path


@rule
def ssatags(version: Json) -> Iterator[str]:
    """Every list declares how server-side apply merges it; a set contains no objects; a map's keys are required in
    every item."""
    for field in fields(version):
        items = field.schema.get("items", {})
        kind = field.schema.get("x-kubernetes-list-type")
        keys = field.schema.get("x-kubernetes-list-map-keys", [])
        fits = {
            "atomic": True,
            "set": "properties" not in items,
            "map": bool(keys) and set(keys) <= set(items.get("required", [])),
        }
        if _is_list(field.schema) and not fits.get(str(kind), False):
            yield field.path


@rule
def statusoptional(version: Json) -> Iterator[str]:
    """The status has no required fields, because it may be written in parts."""
    status = _root(version)["properties"].get("status", {})
    return (f"status.{name}" for name in status.get("required", []))


@rule
def statussubresource(version: Json) -> Iterator[str]:
    """A status field is a subresource, and a status subresource has its field."""
    if ("status" in _root(version)["properties"]) != ("status" in version.get("subresources", {})):
        yield "status"

"""Validates the parts of a job with core/v1 types, like the API server: unknown fields, types, numbers of entries.
Pure.

The pydantic models validate all other fields.
"""

from collections.abc import Iterator
from difflib import get_close_matches
from itertools import islice
from typing import Any, NamedTuple

from pseudoreal_api.spec.job import PseudoRealJobSpec
from pseudoreal_api.spec.kubernetes import CLAIM_SPEC, POD_TEMPLATE, VALUE_SOURCE, VOLUME_SOURCE
from pseudoreal_api.spec.pod import Pod

Json = dict[str, Any]

MOST_MISFITS = 20
"""Maximum number of sentences about one job."""
_LONGEST_NAME = 64
"""Maximum number of characters of a field name, when shown or compared with the schema's names."""
_TYPES: dict[type, str] = {
    bool: "boolean",
    dict: "object",
    float: "number",
    int: "integer",
    list: "array",
    str: "string",
    type(None): "null",
}


class Embedded(NamedTuple):
    """Value of a core/v1 type in a job, with the type's schema."""

    where: str
    value: Json
    schema: Json


def misfits(spec: PseudoRealJobSpec) -> list[str]:
    """Return a sentence for each place where the job violates the core/v1 types, at most MOST_MISFITS."""
    found = (each for part in embedded_in(spec) for each in _misfits(part.schema, part.value, part.where))
    return [*islice(found, MOST_MISFITS)]


def embedded_in(spec: PseudoRealJobSpec) -> Iterator[Embedded]:
    """Yield all values of core/v1 types in the job."""
    yield from _in_pod(spec.pod, "spec.pod")
    start, storage = spec.checkpoint.start_from, spec.checkpoint.storage.volume
    volumes = {"spec.data.volume": spec.data.volume}
    if start and start.hugging_face:
        volumes["spec.checkpoint.startFrom.huggingFace.volume"] = start.hugging_face.volume
    for place, phase in enumerate(spec.phases):
        yield from _in_pod(phase.pod, f"spec.phases[{place}].pod")
        volumes[f"spec.phases[{place}].offload.volume"] = phase.offload.volume
    yield from (_embedded(where, source, VOLUME_SOURCE) for where, source in volumes.items() if source is not None)
    if storage and storage.claim_template:
        where = "spec.checkpoint.storage.volume.claimTemplate.spec"
        yield _embedded(where, storage.claim_template.spec, CLAIM_SPEC)


def _in_pod(pod: Pod, where: str) -> Iterator[Embedded]:
    yield _embedded(f"{where}.template", pod.template, POD_TEMPLATE)
    for place, variable in enumerate(pod.env):
        if variable.value_from is not None:
            yield _embedded(f"{where}.env[{place}].valueFrom", variable.value_from, VALUE_SOURCE)


def _embedded(where: str, value: Json, schema: Json) -> Embedded:
    return Embedded(where, value, {"type": "object"} | schema)


def _misfits(schema: Json, value: Any, where: str) -> Iterator[str]:
    if value is None and schema.get("nullable"):
        return
    if schema.get("x-kubernetes-int-or-string"):
        yield from _misfits_of_quantity(schema, value, where)
        return
    wanted, found = schema["type"], _TYPES.get(type(value), type(value).__name__)
    if found != wanted:
        yield f"{where}: must be of type {wanted}, and is of type {found}; {_remedy(wanted, value)}"
    elif wanted == "array":
        yield from _too_many(where, len(value), schema.get("maxItems"), "items")
        for place, item in enumerate(value[: schema.get("maxItems")]):
            yield from _misfits(schema["items"], item, f"{where}[{place}]")
    elif "additionalProperties" in schema:
        yield from _too_many(where, len(value), schema.get("maxProperties"), "entries")
        for key, entry in islice(value.items(), schema.get("maxProperties")):
            yield from _misfits(schema["additionalProperties"], entry, f"{where}.{_short(key)}")
    elif wanted == "object":
        yield from _misfits_of_object(schema, value, where)


def _misfits_of_object(schema: Json, value: Json, where: str) -> Iterator[str]:
    known = schema["properties"]
    for name in schema.get("required", []):
        if value.get(name) is None:
            yield f"{where}.{name}: Required value; set it"
    for name, inner in value.items():
        if name in known:
            if not (inner is None and name in schema.get("required", [])):
                yield from _misfits(known[name], inner, f"{where}.{name}")
        else:
            yield f'unknown field "{where}.{_short(name)}"{_meant(name, known)}'


def _misfits_of_quantity(schema: Json, value: Any, where: str) -> Iterator[str]:
    if type(value) not in (int, str):
        found = _TYPES.get(type(value), type(value).__name__)
        yield f"{where}: must be of type integer or string, and is of type {found}; put it in quotes"
    elif isinstance(value, str) and len(value) > schema["maxLength"]:
        yield f"{where}: has {len(value)} characters, and can have at most {schema['maxLength']}; shorten it"


def _too_many(where: str, number: int, most: int | None, things: str) -> Iterator[str]:
    if most is not None and number > most:
        yield f"{where}: Too many: {number}: must have at most {most} items; remove some of the {things}"


def _remedy(wanted: str, value: Any) -> str:
    if value is None:
        return "remove it"
    if wanted == "string" and isinstance(value, bool | int | float):
        return f"put {value!r} in quotes"
    return "write it as in a pod"


def _meant(name: str, known: Json) -> str:
    """Return a suggestion for an unknown field name."""
    by_lower = {field.lower(): field for field in known}
    near = get_close_matches(_short(name).lower(), by_lower, n=1)
    return f"; did you mean {by_lower[near[0]]}?" if near else "; remove it"


def _short(name: Any) -> str:
    return str(name)[:_LONGEST_NAME]

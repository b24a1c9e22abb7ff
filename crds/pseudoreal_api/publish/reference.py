"""Generates the manifest reference from the schema: `python -m pseudoreal_api.publish.reference FILE`."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pseudoreal_api.publish.schema import structural_schema
from pseudoreal_api.spec.job import PseudoRealJobSpec
from pseudoreal_api.status.status import PseudoRealJobStatus

INTRODUCTION = """\
# Manifest reference

Generated from `crds/pseudoreal_api` by `make generate`. `kubectl explain prj.spec --recursive` says the same.

`[]` after a name is a list. A required field has no default. Decimals are strings ("3e-4"), as in all Kubernetes APIs.
"""


def to_markdown() -> str:
    parts = [INTRODUCTION]
    for name, model in (("spec", PseudoRealJobSpec), ("status", PseudoRealJobStatus)):
        schema = structural_schema(model)
        parts += [f"## {name}\n", "| field | type | default | meaning |", "| --- | --- | --- | --- |"]
        parts += [_row(*field) for field in _fields(schema, name)]
        parts.append("")
    return "\n".join(parts)


def _fields(schema: dict[str, Any], path: str) -> Iterator[tuple[str, dict[str, Any], bool]]:
    for name, field in schema.get("properties", {}).items():
        # Fields of core/v1 types have no descriptions here; the Kubernetes documentation explains them.
        if "description" not in field:
            continue
        here = f"{path}.{name}" + ("[]" if field.get("type") == "array" else "")
        yield here, field, name in schema.get("required", [])
        yield from _fields(field, here)
        yield from _fields(field.get("items", {}), here)


def _row(path: str, field: dict[str, Any], required: bool) -> str:
    meaning = field.get("description", "").replace("|", "\\|")
    return f"| `{path}` | {_type(field)} | {_default(field, required)} | {meaning} |"


def _type(field: dict[str, Any]) -> str:
    if "enum" in field:
        return " \\| ".join(f"`{value}`" for value in field["enum"])
    kind = str(field.get("type", "integer or string"))
    if kind == "integer" and "minimum" in field:
        return f"integer ≥ {field['minimum']}"
    return kind


def _default(field: dict[str, Any], required: bool) -> str:
    if required:
        return "required"
    default = field.get("default")
    return "" if default in (None, {}, []) else f"`{str(default).lower() if isinstance(default, bool) else default}`"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(to_markdown())

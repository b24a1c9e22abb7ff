"""The generated CustomResourceDefinition."""

from collections.abc import Iterator
from typing import Any

import pytest
from pseudoreal_api.publish.crd import custom_resource_definition
from pseudoreal_api.publish.schema import structural_schema
from pydantic import BaseModel, Field

VERSION = custom_resource_definition()["spec"]["versions"][0]


def _fields(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    for name, field in schema.get("properties", {}).items():
        yield f"{path}.{name}", field
        yield from _fields(field, f"{path}.{name}")
        yield from _fields(field.get("items", {}), f"{path}.{name}[]")


def test_every_field_is_described_in_a_sentence_that_begins_with_it() -> None:
    root = VERSION["schema"]["openAPIV3Schema"]["properties"]
    fields = [*_fields(root["spec"], "spec"), *_fields(root["status"], "status")]
    assert len(fields) > 80
    assert [path for path, field in fields if not _is_described(path, field)] == []


def _is_described(path: str, field: dict[str, Any]) -> bool:
    """Whether `kubectl explain` prints sentences whose subject is the field."""
    text = field.get("description", "")
    return text.startswith(f"{path.rpartition('.')[2]} ") and text.endswith(".")


def test_there_are_no_floats_in_the_spec() -> None:
    fields = _fields(VERSION["schema"]["openAPIV3Schema"]["properties"]["spec"], "spec")
    assert [path for path, field in fields if field.get("type") == "number"] == []


def test_the_short_columns_are_those_that_people_read() -> None:
    names = [column["name"] for column in VERSION["additionalPrinterColumns"] if not column.get("priority")]
    assert names == ["Phase", "Step", "Loss", "Progress", "Restarts", "Age"]


def test_optional_fields_and_defaults() -> None:
    class Inner(BaseModel):
        width: int = Field(4, ge=1, description="Width.")

    class Outer(BaseModel):
        inner: Inner = Field(Inner(), description="Inside.")
        name: str | None = Field(None, description="Name.")

    assert structural_schema(Outer)["properties"] == {
        "inner": {
            "type": "object",
            "description": "Inside.",
            "default": {},
            "properties": {
                "width": {"type": "integer", "format": "int64", "minimum": 1, "default": 4, "description": "Width."}
            },
        },
        "name": {"type": "string", "description": "Name."},
    }


def test_unions_are_refused() -> None:
    class Either(BaseModel):
        value: int | str

    with pytest.raises(ValueError, match="no unions"):
        structural_schema(Either)

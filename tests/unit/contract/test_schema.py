"""Generation of the CustomResourceDefinition; test_linter.py checks its conventions."""

import pytest
from pseudoreal_api.publish.crd import custom_resource_definition
from pseudoreal_api.publish.schema import structural_schema
from pydantic import BaseModel, Field

VERSION = custom_resource_definition()["spec"]["versions"][0]


def test_the_short_columns_are_those_that_people_read() -> None:
    names = [column["name"] for column in VERSION["additionalPrinterColumns"] if not column.get("priority")]
    assert names == ["State", "Phase", "Step", "Loss", "Progress", "Restarts", "Age"]


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

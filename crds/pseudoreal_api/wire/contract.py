"""Compatibility between an operator and a trainer of different releases.

A trainer ignores unknown fields of its configuration. Fields that affect the training must not be ignored. If such a
field is set, the configuration requires the contract number of the release that introduced the field. A trainer with a
lower number ends with an error message.
"""

import json
import re
from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic import BaseModel
from pydantic.alias_generators import to_camel

CONTRACT = 4
"""Contract number of this release; release 0.3.0 has 3. A release that adds binding fields to a configuration raises
the number by one."""

REMEDY = "set spec.pod.image, while the job is suspended, to the trainer of the operator's release, or leave it out"

Json = dict[str, Any]


@dataclass(frozen=True)
class Since:
    """Annotation of a binding field of a configuration: contract number of the release that introduced the field.

    Trainers of earlier contracts act as if the field had its default, so they must refuse any other value. Items of
    lists have no binding fields.
    """

    contract: int
    known: str | None = None
    """Pattern of the beginning of other values that earlier trainers read as they are meant."""

    def is_needed_by(self, value: object) -> bool:
        """Return whether earlier trainers must refuse a value that is not the default."""
        return self.known is None or not re.match(self.known, str(value))


class ContractError(ValueError):
    """The configuration requires more than this trainer release can do; the text names the necessary change."""


def with_contract(config: BaseModel) -> Json:
    """Return the configuration as JSON, with the required contract number, and the fields that require it."""
    needs = _needs(config)
    data: Json = config.model_dump(mode="json", by_alias=True, exclude_none=True)
    return data | {"contractVersion": max(needs.values(), default=3), "needs": needs}


def without_contract(data: bytes) -> Json:
    """Return the configuration without its contract. Raises ContractError if it requires a later contract than this
    release's."""
    config: Json = json.loads(data)
    asked, needs = config.pop("contractVersion", 1), config.pop("needs", {})
    if asked > CONTRACT:
        names = ", ".join(sorted(name for name, contract in needs.items() if contract > CONTRACT)) or "this job"
        raise ContractError(
            f"The image of this pod speaks contract {CONTRACT}, the operator asks for contract {asked}, for {names};"
            f" {REMEDY}"
        )
    return config


@cache
def marks(model: type[BaseModel]) -> dict[str, Since]:
    """Return the `Since` annotations of a model's fields, by field name."""
    fields = model.model_fields.items()
    return {name: mark for name, field in fields for mark in field.metadata if isinstance(mark, Since)}


def _needs(model: BaseModel) -> dict[str, int]:
    """Return the binding fields with values other than their defaults: path -> contract of the field's introduction."""
    found = {}
    for name, field in type(model).model_fields.items():
        value, mark = getattr(model, name), marks(type(model)).get(name)
        if mark and value != field.get_default(call_default_factory=True) and mark.is_needed_by(value):
            found[to_camel(name)] = mark.contract
        if isinstance(value, BaseModel):
            found |= {f"{to_camel(name)}.{path}": contract for path, contract in _needs(value).items()}
    return found

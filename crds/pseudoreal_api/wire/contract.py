"""How an operator and a trainer of different releases understand each other.

A trainer ignores fields of its configuration that it does not know. Where it must not, as they change what is trained,
the configuration asks for the contract that brought them, and a trainer that does not speak it ends with a sentence.
"""

import json
from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic import BaseModel
from pydantic.alias_generators import to_camel

CONTRACT = 4
"""Number of the contract that this release speaks; release 0.3.0 speaks 3. It rises by one with each release that adds
binding fields to a configuration."""

REMEDY = "set spec.pod.image, while the job is suspended, to the trainer of the operator's release, or leave it out"

Json = dict[str, Any]


@dataclass(frozen=True)
class Since:
    """Marks a binding field of a configuration: trainers of earlier contracts do what its default says, and must not go
    on where it says something else. The items of a list have no such fields."""

    contract: int


class ContractError(ValueError):
    """A trainer is asked for what its release cannot do; the text says what to change."""


def with_contract(config: BaseModel) -> Json:
    """The configuration as JSON, with the contract that it needs and the fields that need it."""
    needs = _needs(config)
    data: Json = config.model_dump(mode="json", by_alias=True, exclude_none=True)
    return data | {"contractVersion": max(needs.values(), default=3), "needs": needs}


def without_contract(data: bytes) -> Json:
    """The configuration alone. Raises ContractError where it asks for a later contract than this release's."""
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
    """The marks of a model's fields, by field name."""
    fields = model.model_fields.items()
    return {name: mark for name, field in fields for mark in field.metadata if isinstance(mark, Since)}


def _needs(model: BaseModel) -> dict[str, int]:
    """The fields that a trainer must not ignore: path -> contract that brought it."""
    found = {}
    for name, field in type(model).model_fields.items():
        value, mark = getattr(model, name), marks(type(model)).get(name)
        if mark and value != field.get_default(call_default_factory=True):
            found[to_camel(name)] = mark.contract
        if isinstance(value, BaseModel):
            found |= {f"{to_camel(name)}.{path}": contract for path, contract in _needs(value).items()}
    return found

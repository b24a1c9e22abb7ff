"""How an operator and a trainer of different releases understand each other.

A trainer reads CONFIG_FILE, and LATER_FILE over it, and ignores fields that it does not know. CONFIG_FILE holds what
every trainer knows, those of contract 1 (release 0.2.0) included, which refuse all else; fields that came later are in
LATER_FILE. A field that a trainer must not ignore raises `contractVersion` in CONFIG_FILE, and a trainer that does not
speak that contract ends with a sentence.
"""

import json
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic.alias_generators import to_camel

CONTRACT = 2
"""Number of the contract that this release speaks; it rises by one with each release that adds fields to a
configuration."""

REMEDY = "set spec.pod.image, in a new job, to the trainer of the operator's release, or leave it out"

Json = dict[str, Any]


@dataclass(frozen=True)
class Since:
    """Marks a field of a configuration that trainers of earlier contracts do not know; its default says what they do.
    The items of a list have no such fields.

    `binding`: such a trainer must not go on where the field differs from its default.
    """

    contract: int
    binding: bool = False


class ContractError(ValueError):
    """A trainer is asked for what its release cannot do; the text says what to change."""


def split(config: BaseModel) -> tuple[Json, Json]:
    """The contents of CONFIG_FILE and LATER_FILE, as JSON objects."""
    known, later = _divided(config, config.model_dump(mode="json", by_alias=True, exclude_none=True))
    needs = _needs(config)
    return known | ({"contractVersion": max(needs.values()), "needs": needs} if needs else {}), later


def joined(known: bytes, later: bytes | None) -> Json:
    """The configuration that was split, without what speaks of the contract. Raises ContractError."""
    config: Json = json.loads(known)
    asked, needs = config.pop("contractVersion", 1), config.pop("needs", {})
    if asked > CONTRACT:
        names = ", ".join(sorted(name for name, contract in needs.items() if contract > CONTRACT)) or "this job"
        raise ContractError(
            f"The image of this pod speaks contract {CONTRACT}, the operator asks for contract {asked}, for {names};"
            f" {REMEDY}"
        )
    return _merged(config, json.loads(later)) if later else config


def marks(model: type[BaseModel]) -> dict[str, Since]:
    """The marks of a model's fields, by field name."""
    fields = model.model_fields.items()
    return {name: mark for name, field in fields for mark in field.metadata if isinstance(mark, Since)}


def _divided(model: BaseModel, data: Json) -> tuple[Json, Json]:
    """Two parts of `data`, which is the model as JSON: what all trainers know, and what came later."""
    known, later, marked = dict(data), {}, marks(type(model))
    for name in type(model).model_fields:
        key, value = to_camel(name), getattr(model, name)
        if key not in data:
            continue
        if name in marked:
            later[key] = known.pop(key)
        elif isinstance(value, BaseModel):
            known[key], inner = _divided(value, data[key])
            later |= {key: inner} if inner else {}
    return known, later


def _merged(known: Json, later: Json) -> Json:
    """`known` with `later` laid over it. A part of `later` is a map only where that of `known` is one."""
    both = {key: _merged(known[key], part) for key, part in later.items() if key in known}
    return known | later | both


def _needs(model: BaseModel) -> dict[str, int]:
    """The fields that a trainer must not ignore: path -> contract that brought it."""
    found = {}
    for name, field in type(model).model_fields.items():
        value, mark = getattr(model, name), marks(type(model)).get(name)
        if mark and mark.binding and value != field.get_default(call_default_factory=True):
            found[to_camel(name)] = mark.contract
        if isinstance(value, BaseModel):
            found |= {f"{to_camel(name)}.{path}": contract for path, contract in _needs(value).items()}
    return found

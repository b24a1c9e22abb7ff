"""Building blocks of all models in the contract."""

import re
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

GROUP = "pseudoreal.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "PseudoRealJob"
PLURAL = "pseudorealjobs"


class ApiModel(BaseModel):
    """Strict, immutable model with camelCase JSON keys, the Kubernetes convention."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="forbid", frozen=True)

    def to_json(self, *, indent: int | None = None) -> str:
        return self.model_dump_json(by_alias=True, exclude_none=True, indent=indent)

    def to_dict(self) -> dict[str, Any]:
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


DecimalString = Annotated[
    str,
    Field(pattern=r"^[0-9]+(\.[0-9]+)?([eE]-?[0-9]{1,2})?$", max_length=32),
]
"""Decimal number written as a string: not every client preserves floats in a spec (Kubernetes API conventions,
"Primitive types")."""

DnsLabel = Annotated[str, Field(pattern=r"^[a-z]([-a-z0-9]*[a-z0-9])?$", max_length=30)]

_QUANTITY = r"^[0-9]{1,30}(\.[0-9]{0,30})?([numkMGTPE]|[KMGTPE]i|[eE][-+]?[0-9]{1,2})?$"
"""Pattern of quantities. The pattern limits the digits: a number with an exponent of a thousand nines would fill the
memory."""


def _is_quantity(amount: int | str) -> int | str:
    if not re.fullmatch(_QUANTITY, str(amount)):
        raise ValueError(f"{amount} is not a quantity; write a number with a unit such as 500m, 2, 16Gi")
    return amount


Quantity = Annotated[
    int | str,
    AfterValidator(_is_quantity),
    # For the API server's schema: `minimum` applies to integers only, `pattern` to strings only.
    Field(json_schema_extra={"x-kubernetes-int-or-string": True, "minimum": 0, "pattern": _QUANTITY}),
]
"""Kubernetes quantity: an integer, or a string with a number and a unit."""


def list_map(*keys: str) -> dict[str, Any]:
    """Return the schema extension for a map list: server-side apply merges the list by key, and duplicates are
    refused."""
    return {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": list(keys)}


ATOMIC: dict[str, Any] = {"x-kubernetes-list-type": "atomic"}
"""Schema extension for a list replaced as a whole by server-side apply."""

SET: dict[str, Any] = {"x-kubernetes-list-type": "set"}
"""Schema extension for a list of unique values, merged by server-side apply."""

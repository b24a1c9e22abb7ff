"""Manifests of format version 4, as release 0.3 wrote them, read as version 5. Pure.

In version 4 each matrix of an expert is a tensor, `blocks.0.experts.3.up.weight`. In version 5 the experts of a layer
are one stacked tensor, `blocks.0.experts.up.weight`. The files stay as they are: a piece of a stacked tensor is in the
entry of a single expert, which `entry_name` names.
"""

import re
from collections.abc import Callable, Mapping
from itertools import chain
from math import prod
from typing import Any, Literal, TypeVar

VERSION: Literal[4] = 4

_EXPERT = re.compile(r"(blocks\.[0-9]{1,9}\.experts)\.([0-9]{1,9})\.(.+)")
_MOST_DIVISORS = 10_000_000
"""Most divisors of a manifest. Version 4 leaves out experts that were not measured, so a short text may need many."""

Json = dict[str, Any]
_V = TypeVar("_V")


def as_version_5(manifest: Json) -> Json:
    """Return a manifest of version 4, or the head of one, with the content that version 5 gives it.

    Raises ValueError if the tensors of a layer's experts do not fit together. Other mistakes are left to the models.
    """
    experts = _experts_of(manifest)
    found = manifest | {"formatVersion": 5, "filesVersion": VERSION}
    measurement, link, tensors = (_object(manifest, key) for key in ("measurement", "link", "tensors"))
    if measurement:
        sums = {key: _lists(_object(measurement, key), experts) for key in ("shared", "single")}
        found["measurement"] = measurement | sums
    if link:
        divisors = _divisors(_object(link, "secondMomentDivisors"), experts, link.get("secondMomentDivisor"))
        found["link"] = link | {"secondMomentDivisors": divisors}
    if tensors:
        found["tensors"] = _by_layer(tensors, experts, _stack)
    return found


def entry_name(tensor: str, expert: int) -> str:
    """Return the name, in the files, of an expert's part of a stacked tensor."""
    block, _, matrix = tensor.partition(".experts.")
    return f"{block}.experts.{expert}.{matrix}"


def _by_layer(values: Mapping[str, _V], experts: int, join: Callable[[list[_V]], _V]) -> dict[str, _V]:
    """Return the values under the names of version 5. `experts`: number of experts in a layer. `join` makes the value
    of a stacked tensor from the values of its experts."""
    found: dict[str, _V] = {}
    of_experts: dict[str, dict[int, _V]] = {}
    for name, value in values.items():
        stacked, number = _stacked_name(name)
        found[stacked] = value
        if number is not None:
            of_experts.setdefault(stacked, {})[number] = value
    for name, parts in of_experts.items():
        if len(parts) != experts or max(parts) != experts - 1:
            raise ValueError(f"{name} has {len(parts):,} experts, up to number {max(parts)}, and the model {experts:,}")
        found[name] = join([parts[number] for number in range(experts)])
    return found


def _stacked_name(name: str) -> tuple[str, int | None]:
    """Return the name of the tensor in version 5, and the number of the expert; None for tensors without experts."""
    match = _EXPERT.fullmatch(name)
    return (name, None) if match is None else (f"{match[1]}.{match[3]}", int(match[2]))


def _stack(experts: list[Any]) -> Json:
    """Return the entry of the stacked tensor in the manifest. `experts`: the entries of its experts."""
    shape, dtype = _shape(experts[0]), experts[0].get("dtype")
    if any((_shape(expert), expert.get("dtype")) != (shape, dtype) for expert in experts):
        raise ValueError("the experts of a layer have different shapes or dtypes")
    size = prod(shape)
    pieces = chain.from_iterable(_pieces(expert, size, number * size) for number, expert in enumerate(experts))
    return {"shape": [len(experts), *shape], "dtype": dtype, "pieces": [*pieces]}


def _shape(tensor: Any) -> list[int]:
    shape = tensor.get("shape") if isinstance(tensor, dict) else None
    if not isinstance(shape, list) or not all(isinstance(length, int) for length in shape):
        raise ValueError("an expert has no shape")
    return shape


def _pieces(tensor: Json, size: int, offset: int) -> list[Json]:
    """Return the pieces of an expert of `size` elements as pieces of the stacked tensor, in which the expert begins at
    `offset`."""
    pieces, found, end = tensor.get("pieces"), [], 0
    for piece in pieces if isinstance(pieces, list) else ():
        if not isinstance(piece, dict) or piece.get("begin") != end or not isinstance(piece.get("end"), int):
            raise ValueError("the pieces of an expert are not in order")
        end = piece["end"]
        found.append(piece | {"begin": piece["begin"] + offset, "end": end + offset})
    if end != size:
        raise ValueError(f"the pieces of an expert end at element {end}, and it has {size}")
    return found


def _lists(values: Mapping[str, Any], experts: int) -> dict[str, list[Any]]:
    """Return the values as lists: one value, or, for a stacked tensor, one for each expert."""
    return _by_layer({name: [value] for name, value in values.items()}, experts, lambda found: [*chain(*found)])


def _divisors(values: Mapping[str, Any], experts: int, usual: Any) -> dict[str, list[Any]]:
    """Return the divisors as `_lists` does. `usual`: the divisor of an expert that was not measured."""
    stacked = {name for name, number in map(_stacked_name, values) if number is not None}
    if len(stacked) * experts > _MOST_DIVISORS:
        raise ValueError(f"{len(stacked):,} tensors of {experts:,} experts have more than {_MOST_DIVISORS:,} divisors")
    absent = {entry_name(name, number): usual for name in stacked for number in range(experts)}
    return _lists(absent | dict(values), experts)


def _experts_of(manifest: Json) -> int:
    count = _object(_object(manifest, "model"), "experts").get("count")
    return count if isinstance(count, int) else 0


def _object(of: Json, key: str) -> Json:
    """Return the object under a key; an empty one if the value is of another type."""
    value = of.get(key)
    return value if isinstance(value, dict) else {}

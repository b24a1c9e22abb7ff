"""The units of a model: what moves and is updated as one. Pure.

A block's experts are part of its unit.

A unit's parameters form one flat vector: the matrices first, then the vectors, because weight decay acts on the former
only and is so one range of the vector, wherever shards cut it.
"""

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Literal

from pseudoreal_api.spec.model import Model

VOCABULARY = 256
"""Number of different tokens: one for each byte."""

Kind = Literal["weights", "first_moment", "second_moment"]
KINDS: tuple[Kind, ...] = ("weights", "first_moment", "second_moment")
"""Kinds of the vectors that make up a unit's state."""

VECTOR = 16
"""Most elements that a processor handles at once; the rest of a range it rounds in another way."""

EMBEDDING, HEAD = "embedding", "head"


@dataclass(frozen=True)
class Parameter:
    name: str
    """Name in the model and in checkpoints."""
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class Unit:
    name: str
    parameters: tuple[Parameter, ...]
    """Parameters in the order of the flat vector."""

    @cached_property
    def numel(self) -> int:
        return sum(parameter.numel for parameter in self.parameters)

    @cached_property
    def decayed(self) -> int:
        """Number of elements at the start of the flat vector on which weight decay acts."""
        return sum(parameter.numel for parameter in self.parameters if len(parameter.shape) > 1)

    def shard(self, rank: int, ranks: int) -> range:
        """The part of the flat vector that a rank holds; the last parts may reach into the padding behind `numel`."""
        length = self.shard_length(ranks)
        return range(rank * length, (rank + 1) * length)

    def shard_length(self, ranks: int) -> int:
        """Elements of each rank's part: a whole number of the processor's vectors, so that the update of an element
        does not depend on the cuts."""
        return self.numel if ranks == 1 else -(-self.numel // (ranks * VECTOR)) * VECTOR


def units_of(model: Model, blocks: int) -> tuple[Unit, ...]:
    """The embedding, the blocks, then the final norm with the head."""
    return (
        _unit(EMBEDDING, {"embedding.weight": (VOCABULARY, model.hidden_size)}),
        *(_unit(block_name(block), _block(model, block)) for block in range(blocks)),
        _unit(HEAD, {"norm.weight": (model.hidden_size,), "head.weight": (VOCABULARY, model.hidden_size)}),
    )


def block_name(block: int) -> str:
    return f"blocks.{block}"


def block_of(name: str) -> int | None:
    """Number of the block that a tensor belongs to."""
    first, _, rest = name.partition(".")
    return int(rest.partition(".")[0]) if first == "blocks" else None


def unit_of(name: str) -> str:
    """Name of the unit that a tensor belongs to."""
    block = block_of(name)
    if block is not None:
        return block_name(block)
    return EMBEDDING if name.startswith(f"{EMBEDDING}.") else HEAD


def in_block(name: str, block: int) -> str:
    """The same tensor of another block."""
    return f"{block_name(block)}.{name.split('.', 2)[2]}"


def _block(model: Model, block: int) -> dict[str, tuple[int, ...]]:
    hidden = model.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"attention_norm.weight": (hidden,)}
    shapes |= {f"attention.{name}.weight": (hidden, hidden) for name in ("query", "key", "value", "output")}
    shapes |= {"ffn_norm.weight": (hidden,)}
    if model.experts is None:
        shapes |= _feed_forward(model, "ffn")
    else:
        shapes |= {"router.weight": (model.experts.count, hidden)}
        for expert in range(model.experts.count):
            shapes |= _feed_forward(model, f"experts.{expert}")
    return {f"{block_name(block)}.{name}": shape for name, shape in shapes.items()}


def _feed_forward(model: Model, name: str) -> dict[str, tuple[int, ...]]:
    hidden, inner = model.hidden_size, model.feed_forward.size
    shapes: dict[str, tuple[int, ...]] = {"up": (inner, hidden), "down": (hidden, inner)}
    if model.feed_forward.activation == "SwiGLU":
        shapes = {"gate": (inner, hidden)} | shapes
    return {f"{name}.{matrix}.weight": shape for matrix, shape in shapes.items()}


def _unit(name: str, shapes: dict[str, tuple[int, ...]]) -> Unit:
    parameters = [Parameter(*item) for item in shapes.items()]
    return Unit(name, tuple(sorted(parameters, key=lambda parameter: len(parameter.shape) == 1)))

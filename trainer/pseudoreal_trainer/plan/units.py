"""The units of a model: what moves and is updated as one. Pure.

A layer with experts has two: its block, to which the router belongs, and the experts, which layers may share without
sharing the block. Names say which: `blocks.3.experts.up.weight` is of the unit `blocks.3.experts`, the experts of the
number 3. Each of its tensors is stacked: it has the matrices, or the biases, of all experts of the layer, one behind
the other. A unit may have some neighbouring experts alone, and so a range of each tensor.

A unit's parameters form one flat vector: the matrices first, then biases and the weights of norms, because weight decay
acts on the former only and is so one range of the vector, wherever shards cut it. Last comes a balancing bias, which no
gradient trains; no shard cuts it, as its update is one of all experts together.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Literal

from pseudoreal_api.resolved.layers import blocks_of_layers, experts_of_layers, sets_of
from pseudoreal_api.spec.model import FeedForward, Model
from pseudoreal_api.spec.phase import Sharing

Kind = Literal["weights", "first_moment", "second_moment"]
KINDS: tuple[Kind, ...] = ("weights", "first_moment", "second_moment")
"""Kinds of the vectors that make up a unit's state."""

VECTOR = 16
"""Most elements that a processor handles at once; the rest of a range it rounds in another way."""

EMBEDDING, HEAD = "embedding", "head"
EXCLUDED = {"Embedding": EMBEDDING, "Head": HEAD}
"""What `optimizer.decayExclusions` may name -> the unit whose only matrix that is."""


@dataclass(frozen=True)
class Parameter:
    """What a unit has of a tensor: all of it, or of a stacked one the part of some experts."""

    name: str
    """Name in the model and in checkpoints."""
    whole: tuple[int, ...]
    """Shape of the whole tensor."""
    experts: range | None = None
    """Numbers of the experts whose part it is; None: the tensor is not stacked."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.whole if self.experts is None else (len(self.experts), *self.whole[1:])

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def begin(self) -> int:
        """First element of the part, counted in the flattened tensor."""
        return 0 if self.experts is None else self.experts.start * prod(self.whole[1:])

    @property
    def is_balancing(self) -> bool:
        """Whether it is the bias that balances experts, which changes by the number of tokens that each one gets."""
        return self.name.endswith(".balancing_bias")

    @property
    def is_bias(self) -> bool:
        return self.name.endswith(".bias") or self.is_balancing

    @property
    def is_matrix(self) -> bool:
        """Whether it is neither a bias nor the weight of a norm. The name says so, not the number of dimensions."""
        return not (self.is_bias or self.name.endswith("norm.weight"))


@dataclass(frozen=True)
class Unit:
    name: str
    parameters: tuple[Parameter, ...]
    """Parameters in the order of the flat vector."""

    @cached_property
    def numel(self) -> int:
        return sum(parameter.numel for parameter in self.parameters)

    @cached_property
    def trained(self) -> int:
        """Number of elements at the start of the flat vector that gradients train; behind them is the balancing bias,
        where there is one."""
        return sum(parameter.numel for parameter in self.parameters if not parameter.is_balancing)

    @cached_property
    def is_of_mixture(self) -> bool:
        """Whether it is the block of a layer with experts, without these."""
        return any(".router." in parameter.name for parameter in self.parameters)

    @property
    def is_experts(self) -> bool:
        return are_experts(self.name)

    @property
    def experts(self) -> range | None:
        """Numbers of the experts that it has; None: it is no unit of experts."""
        return self.parameters[0].experts

    def of_experts(self, experts: range) -> "Unit":
        """The unit with these neighbouring experts alone, which are among its own."""
        own = self.experts
        assert own is not None, "a unit of experts has some"
        assert experts.start in own, "the first is among its own"
        assert experts[-1] in own, "the last is among its own"
        return replace(self, parameters=tuple(replace(one, experts=experts) for one in self.parameters))

    def of_rank(self, coordinate: int, ranks: int) -> "Unit":
        """What a rank has of the unit where a layer's experts are spread over so many ranks: of experts those with
        neighbouring numbers that are its own, of any other unit all."""
        if ranks == 1 or self.experts is None:
            return self
        assert len(self.experts) % ranks == 0, "the job's rules say so"
        count = len(self.experts) // ranks
        first = self.experts.start + coordinate * count
        return self.of_experts(range(first, first + count))

    def in_groups(self, groups: int) -> tuple["Unit", ...]:
        """Experts in as many groups of neighbouring ones; any other unit as it is. All groups have the unit's name."""
        if groups == 1 or self.experts is None:
            return (self,)
        count = len(self.experts) // groups
        return tuple(self.of_experts(range(first, first + count)) for first in self.experts[::count])

    def shard(self, rank: int, ranks: int) -> range:
        """The part of the flat vector that a rank holds; the last parts may reach into the padding behind `numel`."""
        length = self.shard_length(ranks)
        return range(rank * length, (rank + 1) * length)

    def shard_length(self, ranks: int) -> int:
        """Elements of each rank's part: a whole number of the processor's vectors, so that the update of an element
        does not depend on the cuts, and so many that none of them cuts the balancing bias."""
        if ranks == 1:
            return self.numel
        length = -(-self.numel // (ranks * VECTOR)) * VECTOR
        while self.trained // length < (self.numel - 1) // length:
            length += VECTOR
        return length


def units_of(model: Model, sharing: Sharing) -> tuple[Unit, ...]:
    """The embedding, the blocks, the experts, then the final norm with the head. Where embeddings are tied, the first
    unit is the last as well: it has the final norm, and the embedding's matrix is the head's."""
    layers, matrix = blocks_of_layers(sharing, model.layers), (model.vocabulary_size, model.hidden_size)
    embedding: Shapes = {"embedding.weight": matrix}
    norm: Shapes = {"norm.weight": (model.hidden_size,)}
    between = [
        *(_unit(block_name(b), _block(model, b, layers.index(b))) for b in sorted(set(layers))),
        *(_experts(model, number) for number in sets_of(experts_of_layers(sharing, model))),
    ]
    if model.embeddings == "Tied":
        return (_unit(EMBEDDING, embedding | norm), *between)
    return (_unit(EMBEDDING, embedding), *between, _unit(HEAD, norm | {"head.weight": matrix}))


def block_name(block: int) -> str:
    return f"blocks.{block}"


def experts_name(number: int) -> str:
    return f"{block_name(number)}.experts"


def are_experts(name: str) -> bool:
    """Whether it is the name of experts, or of a tensor of theirs: neither of the router nor of its bias."""
    first, *rest = name.split(".")
    return first == "blocks" and rest[1:2] == ["experts"] and rest[2:] != ["balancing_bias"]


def block_of(name: str) -> int | None:
    """Number of the block that a tensor belongs to; with experts, theirs."""
    first, _, rest = name.partition(".")
    return int(rest.partition(".")[0]) if first == "blocks" else None


def unit_of(name: str, model: Model) -> str:
    """Name of the unit that a tensor of the model belongs to."""
    block = block_of(name)
    if block is not None:
        return experts_name(block) if are_experts(name) else block_name(block)
    return EMBEDDING if model.embeddings == "Tied" or name.startswith(f"{EMBEDDING}.") else HEAD


def in_block(name: str, block: int) -> str:
    """The same tensor of another block, or of other experts."""
    return f"{block_name(block)}.{name.split('.', 2)[2]}"


Shapes = dict[str, tuple[int, ...]]
"""Name of a parameter, as its owner calls it -> shape."""

_NORMS = {"Pre": ("norm",), "Post": ("output_norm",), "Both": ("norm", "output_norm")}
_BIASES = {"None": (), "QueryKeyValue": ("query", "key", "value"), "All": ("query", "key", "value", "output")}


def _block(model: Model, block: int, layer: int) -> Shapes:
    """The parameters of a block that this layer uses, and others of its kind."""
    shapes = _norms(model, "attention") | _attention(model) | _norms(model, "ffn")
    if model.has_experts(layer):
        shapes |= _router(model)
    else:
        shapes |= _feed_forward(model.hidden_size, model.feed_forward, "ffn")
    return {f"{block_name(block)}.{name}": shape for name, shape in shapes.items()}


def _router(model: Model) -> Shapes:
    """What a layer with experts has of its own, and what all of its tokens go through."""
    assert model.experts is not None, "the layer has experts"
    shapes: Shapes = {"router.weight": (model.experts.count, model.hidden_size)}
    if model.top_k and model.top_k.bias_update_rate is not None:
        shapes["experts.balancing_bias"] = (model.experts.count,)
    return shapes | (_feed_forward(model.hidden_size, model.shared_expert, "shared") if model.shared_expert else {})


def _experts(model: Model, number: int) -> Unit:
    """The experts of this number, whole."""
    assert model.experts is not None, "layers have experts"
    count, name = model.experts.count, experts_name(number)
    of_each = _feed_forward(model.hidden_size, model.expert, name)
    unit = _unit(name, {tensor: (count, *shape) for tensor, shape in of_each.items()})
    return replace(unit, parameters=tuple(replace(one, experts=range(count)) for one in unit.parameters))


def _norms(model: Model, part: str) -> Shapes:
    return {f"{part}_{name}.weight": (model.hidden_size,) for name in _NORMS[model.norm.placement]}


def _attention(model: Model) -> Shapes:
    hidden, query, key, kind = model.hidden_size, model.query_size, model.key_size, model.attention.query_key_norm
    matrices = {"query": (query, hidden), "key": (key, hidden), "value": (key, hidden), "output": (hidden, query)}
    shapes: Shapes = {f"{name}.weight": shape for name, shape in matrices.items()}
    shapes |= {f"{name}.bias": matrices[name][:1] for name in _BIASES[model.attention.bias]}
    if kind != "None":
        sizes = {"query_norm": query, "key_norm": key}
        shapes |= {f"{n}.weight": (model.head_size if kind == "PerHead" else size,) for n, size in sizes.items()}
    return {f"attention.{name}": shape for name, shape in shapes.items()}


def _feed_forward(hidden: int, spec: FeedForward, name: str) -> Shapes:
    matrices = {"up": (spec.size, hidden), "down": (hidden, spec.size)}
    if spec.activation == "SwiGLU":
        matrices = {"gate": (spec.size, hidden)} | matrices
    shapes: Shapes = {f"{name}.{matrix}.weight": shape for matrix, shape in matrices.items()}
    if spec.bias == "All":
        shapes |= {f"{name}.{matrix}.bias": shape[:1] for matrix, shape in matrices.items()}
    return shapes


def _unit(name: str, shapes: Shapes) -> Unit:
    parameters = [Parameter(*item) for item in shapes.items()]
    return Unit(name, tuple(sorted(parameters, key=lambda one: (not one.is_matrix, one.is_balancing))))

"""The units of a model: parameters that are moved, sharded and updated as one flat vector. Pure.

A layer with experts has two units: its block, which includes the router, and its experts. Layers may share experts
without sharing the block. The name of a parameter determines its unit: `blocks.3.experts.up.weight` belongs to the
unit `blocks.3.experts`. Tensors of experts are stacked: each contains the matrices, or the biases, of all
experts of the layer, one after the other. A unit with only a contiguous range of the experts has a contiguous range of
each tensor.

In the flat vector the matrices come first, then biases and norm weights: weight decay acts on matrices only, and so on
one range of the vector, wherever shards cut it. Of the matrices the router comes last: Muon updates the matrices
before it, and so the start of the vector. At the end of the vector comes a balancing bias. No gradient trains it, and
no shard cuts it, because all experts' values are updated together.

With tensor parallelism, a rank's block has slices of the matrices of attention and MLPs: rows of query, key, value,
gate and up, columns of output and down. All other tensors of the block are replicated on the tensor ranks. The
matrices of embedding and head are cut by rows, if the ranks divide the vocabulary; the final norm is replicated.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Literal

from pseudoreal_api.resolved.layers import blocks_of_layers, experts_of_layers, sets_of
from pseudoreal_api.spec.model import FeedForward, Model
from pseudoreal_api.spec.phase import Sharing

from pseudoreal_trainer.plan.newton_schulz import flops

Kind = Literal["weights", "first_moment", "second_moment"]
KINDS: tuple[Kind, ...] = ("weights", "first_moment", "second_moment")
"""Vectors of a unit's state."""
MOMENTS: tuple[Kind, ...] = ("first_moment", "second_moment")

VECTOR = 16
"""Elements of the widest SIMD vector of the CPU. Cuts are at multiples of it, because the tail of a range, shorter than
a vector, may be rounded differently."""

PAGE_ELEMENTS = 2048
"""Number of elements that take whole pages of a disk in every dtype."""

EMBEDDING, HEAD = "embedding", "head"
_EMBEDDING_MATRIX, _HEAD_MATRIX = "embedding.weight", "head.weight"
EXCLUDED = {"Embedding": EMBEDDING, "Head": HEAD}
"""Value of `optimizer.decayExclusions` -> unit; the excluded matrix is the only matrix of that unit."""


@dataclass(frozen=True)
class Cut:
    """Cut of a tensor over tensor ranks."""

    axis: int
    """Dimension that is cut: 0 or 1."""
    parts: int
    """Number of equal parts of this dimension that stay whole: heads, hidden features, or tokens of the vocabulary."""


@dataclass(frozen=True)
class Slice:
    """One of several equal slices of a tensor, along one dimension."""

    axis: int
    """Dimension that is cut: 0 or 1."""
    index: int
    count: int
    """Number of slices."""


@dataclass(frozen=True)
class Parameter:
    """A unit's part of a tensor: the whole tensor, the part of some experts in a stacked tensor, or the slice of a
    tensor rank."""

    name: str
    """Name in the model and in checkpoints."""
    whole: tuple[int, ...]
    """Shape of the whole tensor."""
    experts: range | None = None
    """Numbers of the experts in the part; None: the tensor is not stacked."""
    cut: Cut | None = None
    """Cut over tensor ranks; None: each of them has the whole tensor."""
    slice: Slice | None = None
    """Slice that is the part; None: this is not a part of a cut tensor."""

    @property
    def shape(self) -> tuple[int, ...]:
        if self.slice is not None:
            axis = self.slice.axis
            return (*self.whole[:axis], self.whole[axis] // self.slice.count, *self.whole[axis + 1 :])
        return self.whole if self.experts is None else (len(self.experts), *self.whole[1:])

    @property
    def column_slices(self) -> int:
        """Number of slices of columns that `begin` counts one after the other; 1: it counts the tensor row by row."""
        return self.slice.count if self.slice is not None and self.slice.axis == 1 else 1

    @property
    def rows(self) -> range:
        """Indices, in the first dimension of the whole tensor, of the part."""
        return range(self.whole[0]) if self.experts is None else self.experts

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def begin(self) -> int:
        """Index of the part's first element in the flattened tensor, or in the flattened slices of columns, one slice
        after the other."""
        if self.slice is not None:
            return self.slice.index * self.numel
        return 0 if self.experts is None else self.experts.start * prod(self.whole[1:])

    def sliced(self, coordinate: int, ranks: int) -> "Parameter":
        """Return the slice of a tensor rank; the parameter unchanged if it is not cut, or has fewer parts than
        ranks."""
        if self.cut is None or self.cut.parts % ranks:
            return self
        return replace(self, slice=Slice(self.cut.axis, coordinate, ranks))

    @property
    def is_balancing(self) -> bool:
        """Whether this is a balancing bias, which is updated from the token counts of the experts, not by AdamW."""
        return self.name.endswith(".balancing_bias")

    @property
    def is_bias(self) -> bool:
        return _is_bias(self.name)

    @property
    def is_matrix(self) -> bool:
        """Whether this is neither a bias nor a norm weight. The name decides, not the number of dimensions."""
        return _is_matrix(self.name)

    @property
    def is_hidden_matrix(self) -> bool:
        """Whether this is a matrix of attention or of a feed-forward part, or the stacked matrices of experts."""
        return is_hidden_matrix(self.name)


def in_pages(begin: int, end: int, length: int) -> range:
    """Return the elements begin..end-1 of a vector of this length, with all other elements of their pages."""
    return range(begin // PAGE_ELEMENTS * PAGE_ELEMENTS, min(-(-end // PAGE_ELEMENTS) * PAGE_ELEMENTS, length))


@dataclass(frozen=True)
class Matrix:
    """A matrix in a unit's flat vector, row by row."""

    begin: int
    """Index of the first element."""
    rows: int
    columns: int

    @property
    def numel(self) -> int:
        return self.rows * self.columns

    @property
    def end(self) -> int:
        return self.begin + self.numel


@dataclass(frozen=True)
class Unit:
    """Parameters that are moved, sharded and updated as one flat vector."""

    name: str
    parameters: tuple[Parameter, ...]
    """Parameters in the order of the flat vector."""

    @cached_property
    def numel(self) -> int:
        return sum(parameter.numel for parameter in self.parameters)

    @cached_property
    def trained(self) -> int:
        """Number of elements that gradients train, at the start of the flat vector. A balancing bias comes after these
        elements."""
        return sum(parameter.numel for parameter in self.parameters if not parameter.is_balancing)

    @cached_property
    def hidden_matrices(self) -> tuple[Matrix, ...]:
        """The matrices of attention and feed-forward parts, and of each expert; one after the other, at the start of
        the flat vector."""
        found: list[Matrix] = []
        begin = 0
        for parameter in self.parameters:
            if parameter.is_hidden_matrix:
                rows, columns = parameter.shape[-2:]
                end = begin + parameter.numel
                found += [Matrix(first, rows, columns) for first in range(begin, end, rows * columns)]
                begin = end
        return tuple(found)

    @cached_property
    def hidden(self) -> int:
        """Number of elements of `hidden_matrices`."""
        return sum(matrix.numel for matrix in self.hidden_matrices)

    @cached_property
    def hidden_in_pages(self) -> int:
        """Number of elements in the pages of `hidden_matrices`; a page that two matrices share counts twice."""
        return sum(len(in_pages(matrix.begin, matrix.end, self.numel)) for matrix in self.hidden_matrices)

    @cached_property
    def orthogonalization_flops(self) -> int:
        """Floating-point operations in which Muon orthogonalizes `hidden_matrices`."""
        return sum(flops(matrix.rows, matrix.columns) for matrix in self.hidden_matrices)

    @cached_property
    def is_of_mixture(self) -> bool:
        """Whether this is the block of a layer with experts."""
        return any(".router." in parameter.name for parameter in self.parameters)

    @property
    def is_experts(self) -> bool:
        return are_experts(self.name)

    @cached_property
    def is_sliced(self) -> bool:
        """Whether tensors of the unit are slices of a tensor rank."""
        return any(parameter.slice is not None for parameter in self.parameters)

    @cached_property
    def replicated(self) -> tuple[range, ...]:
        """Ranges of the flat vector with the tensors that all tensor ranks have; empty without slices."""
        found: list[range] = []
        begin = 0
        for parameter in self.parameters if self.is_sliced else ():
            end = begin + parameter.numel
            if parameter.slice is None:
                is_next = bool(found) and found[-1].stop == begin
                found[-1 if is_next else len(found) :] = [range(found[-1].start if is_next else begin, end)]
            begin = end
        return tuple(found)

    @property
    def experts(self) -> range | None:
        """Numbers of the unit's experts; None for a unit without experts."""
        return self.parameters[0].experts

    def of_experts(self, experts: range) -> "Unit":
        """Return the unit with only these experts: a contiguous range of the unit's experts."""
        own = self.experts
        assert own is not None, "only units of experts are cut by experts"
        assert experts.start in own, "the first expert is among the unit's own"
        assert experts[-1] in own, "the last expert is among the unit's own"
        return replace(self, parameters=tuple(replace(one, experts=experts) for one in self.parameters))

    def of_rank(self, coordinate: int, ranks: int) -> "Unit":
        """Return the part of the unit that a rank holds under expert parallelism over `ranks` ranks: the unit with only
        the rank's contiguous range of experts. A unit without experts is returned unchanged."""
        if ranks == 1 or self.experts is None:
            return self
        assert len(self.experts) % ranks == 0, "the job's rules make expertRanks divide the number of experts"
        count = len(self.experts) // ranks
        first = self.experts.start + coordinate * count
        return self.of_experts(range(first, first + count))

    def sliced(self, coordinate: int, ranks: int) -> "Unit":
        """Return the part of the unit that a tensor rank holds: a block with slices of the matrices of attention and
        MLPs, or an end of the model with a slice of the vocabulary. Experts are returned unchanged."""
        if ranks == 1 or not any(one.cut for one in self.parameters):
            return self
        return replace(self, parameters=tuple(one.sliced(coordinate, ranks) for one in self.parameters))

    def in_groups(self, groups: int) -> tuple["Unit", ...]:
        """Return the unit cut into `groups` units, each with a contiguous range of the experts and all with the unit's
        name. A unit without experts is returned uncut."""
        if groups == 1 or self.experts is None:
            return (self,)
        count = len(self.experts) // groups
        return tuple(self.of_experts(range(first, first + count)) for first in self.experts[::count])

    def shard(self, rank: int, ranks: int) -> range:
        """Return the shard of a rank, as a range of the flat vector. The last shards may reach into the padding after
        `numel`."""
        length = self.shard_length(ranks)
        return range(rank * length, (rank + 1) * length)

    def shard_length(self, ranks: int) -> int:
        """Return the number of elements of each shard: a multiple of VECTOR, so that the update of an element does not
        depend on the cuts, and large enough that no cut goes through the balancing bias. With one rank, all elements
        without padding."""
        if ranks == 1:
            return self.numel
        length = -(-self.numel // (ranks * VECTOR)) * VECTOR
        while self.trained // length < (self.numel - 1) // length:
            length += VECTOR
        return length


def units_of(model: Model, sharing: Sharing) -> tuple[Unit, ...]:
    """Return the embedding, the blocks, the experts, then the final norm with the head. With tied embeddings, the first
    unit is also the head's unit: it has the final norm, and its matrix serves the embedding and the head."""
    layers, matrix = blocks_of_layers(sharing, model.layers), (model.vocabulary_size, model.hidden_size)
    embedding: Shapes = {_EMBEDDING_MATRIX: matrix}
    norm: Shapes = {"norm.weight": (model.hidden_size,)}
    between = [
        *(_unit(block_name(b), _block(model, b, layers.index(b))) for b in sorted(set(layers))),
        *(_experts(model, number) for number in sets_of(experts_of_layers(sharing, model))),
    ]
    if model.embeddings == "Tied":
        units = (_unit(EMBEDDING, embedding | norm), *between)
    else:
        units = (_unit(EMBEDDING, embedding), *between, _unit(HEAD, norm | {_HEAD_MATRIX: matrix}))
    return tuple(_cuttable(unit, model) for unit in units)


def _cuttable(unit: Unit, model: Model) -> Unit:
    """Return the unit with the cuts of tensor ranks."""
    return replace(unit, parameters=tuple(replace(one, cut=_cut(one.name, model)) for one in unit.parameters))


def block_name(block: int) -> str:
    return f"blocks.{block}"


def experts_name(number: int) -> str:
    return f"{block_name(number)}.experts"


def are_experts(name: str) -> bool:
    """Return whether the name belongs to a unit of experts or one of its tensors; router and balancing bias belong to
    the block."""
    first, *rest = name.split(".")
    return first == "blocks" and rest[1:2] == ["experts"] and rest[2:] != ["balancing_bias"]


def is_router(name: str) -> bool:
    return name.endswith(".router.weight")


def is_hidden_matrix(name: str) -> bool:
    """Return whether the tensor is a matrix of attention or of a feed-forward part, or the stacked matrices of
    experts."""
    return _is_matrix(name) and block_of(name) is not None and not is_router(name)


def _is_matrix(name: str) -> bool:
    return not (_is_bias(name) or name.endswith("norm.weight"))


def _is_bias(name: str) -> bool:
    return name.endswith((".bias", ".balancing_bias"))


def is_residual_output(name: str) -> bool:
    """Return whether the tensor makes what a layer adds to the residual stream: zeros there add nothing."""
    return name.rpartition(".")[0].endswith((".attention.output", ".down"))


def has_expert_rows(name: str) -> bool:
    """Return whether the tensor's first dimension is that of the experts: stacked tensors, router, balancing bias."""
    return are_experts(name) or is_router(name) or name.endswith(".experts.balancing_bias")


def block_of(name: str) -> int | None:
    """Return the number of the block, or of the experts, that a tensor belongs to; None for other tensors."""
    first, _, rest = name.partition(".")
    return int(rest.partition(".")[0]) if first == "blocks" else None


def unit_of(name: str, model: Model) -> str:
    """Return the name of the unit that a tensor of the model belongs to."""
    block = block_of(name)
    if block is not None:
        return experts_name(block) if are_experts(name) else block_name(block)
    return EMBEDDING if model.embeddings == "Tied" or name.startswith(f"{EMBEDDING}.") else HEAD


def in_block(name: str, block: int) -> str:
    """Return the name of the same tensor in another block, or in other experts."""
    return f"{block_name(block)}.{name.split('.', 2)[2]}"


def _cut(name: str, model: Model) -> Cut | None:
    """Return the cut of a tensor over tensor ranks; None: each rank has the whole tensor. Query, key, value, gate and
    up are cut by rows, output and down by columns, embedding and head by tokens of the vocabulary (Megatron-LM, arXiv
    1909.08053, section 3)."""
    if name in (_EMBEDDING_MATRIX, _HEAD_MATRIX):
        return Cut(0, model.vocabulary_size)
    if block_of(name) is None or are_experts(name):
        return None
    part, matrix, tensor = [*name.split(".")[2:], ""][:3]
    sizes = {"ffn": model.feed_forward.size, "shared": model.shared_expert.size if model.shared_expert else 0}
    heads, keys = model.attention.heads, model.key_size // model.head_size
    parts = {"query": heads, "key": keys, "value": keys, "output": heads} if part == "attention" else {}
    if part in sizes:
        parts = dict.fromkeys(("gate", "up", "down"), sizes[part])
    if matrix not in parts or (matrix in ("output", "down") and tensor == "bias"):
        return None
    return Cut(1 if matrix in ("output", "down") else 0, parts[matrix])


Shapes = dict[str, tuple[int, ...]]
"""Name of a parameter, relative to its owner -> shape."""

_NORMS = {"Pre": ("norm",), "Post": ("output_norm",), "Both": ("norm", "output_norm")}
_BIASES = {"None": (), "QueryKeyValue": ("query", "key", "value"), "All": ("query", "key", "value", "output")}


def _block(model: Model, block: int, layer: int) -> Shapes:
    """Return the parameters of a block. `layer`: any layer that uses the block or a block of the same kind."""
    shapes = _norms(model, "attention") | _attention(model) | _norms(model, "ffn")
    if model.has_experts(layer):
        shapes |= _router(model)
    else:
        shapes |= _feed_forward(model.hidden_size, model.feed_forward, "ffn")
    return {f"{block_name(block)}.{name}": shape for name, shape in shapes.items()}


def _router(model: Model) -> Shapes:
    """Return the parameters of a layer with experts that belong to its block: router, balancing bias, and shared
    experts."""
    assert model.experts is not None, "the layer has experts"
    shapes: Shapes = {"router.weight": (model.experts.count, model.hidden_size)}
    if model.top_k and model.top_k.bias_update_rate is not None:
        shapes["experts.balancing_bias"] = (model.experts.count,)
    return shapes | (_feed_forward(model.hidden_size, model.shared_expert, "shared") if model.shared_expert else {})


def _experts(model: Model, number: int) -> Unit:
    """Return the unit of experts with this number, with all of its experts."""
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
    return Unit(name, tuple(sorted(parameters, key=_place)))


def _place(parameter: Parameter) -> tuple[bool, bool, bool]:
    return not parameter.is_hidden_matrix, not parameter.is_matrix, parameter.is_balancing

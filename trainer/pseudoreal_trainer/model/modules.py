"""Modules that compute the units of a model. Modules own no weights: `UnitModule.bind` binds the weights of a unit
before a pass."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from pseudoreal_api.spec.model import Model
from torch import Tensor, nn

from pseudoreal_trainer.model import vocabulary
from pseudoreal_trainer.model.attention import Scope, attend_within, window_mask
from pseudoreal_trainer.model.block import Block, RoutedTokens
from pseudoreal_trainer.model.context import SequenceParts
from pseudoreal_trainer.model.experts import Experts, RouterStatistics, RoutingDecision, SavedDecision
from pseudoreal_trainer.model.head import Head, TiedEmbeddingHead, embedding_and_head
from pseudoreal_trainer.model.rotary import rotary, rotation_at
from pseudoreal_trainer.model.tensor import TensorRanks
from pseudoreal_trainer.model.top_k import TopKExperts
from pseudoreal_trainer.plan.units import HEAD, Unit, block_name, block_of


class UnitModule:
    """The module, or the part of a module, that computes all units of one kind. `bind` selects the unit: the parameters
    become views of the unit's weights."""

    def __init__(self, module: nn.Module, unit: Unit) -> None:
        """`unit`: any unit of the module's kind."""
        self.module = module
        prefix = _prefix(unit)
        names = [parameter.name.removeprefix(prefix) for parameter in unit.parameters]
        self._shapes = [parameter.shape for parameter in unit.parameters]
        self.parameters = [_without_storage(module, name) for name in names]
        self.trained = [parameter for parameter in self.parameters if parameter.requires_grad]
        """Parameters that have gradients: all except a balancing bias, which comes last."""

    @property
    def numel(self) -> int:
        """Number of elements of all parameters together."""
        return sum(torch.Size(shape).numel() for shape in self._shapes)

    def bind(self, flat: Tensor) -> None:
        """Make the parameters views of `flat`, a working copy, [at least numel]."""
        for parameter, view in zip(self.parameters, views(flat, self._shapes), strict=True):
            parameter.data = view

    def views(self, flat: Tensor) -> list[Tensor]:
        """Return views of a gradient, [at least numel], in the order and shapes of `parameters`."""
        return views(flat, self._shapes)


def views(flat: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """Return views of a flat vector as tensors of these shapes, one after the other."""
    sizes = [torch.Size(shape).numel() for shape in shapes]
    parts = torch.split(flat[: sum(sizes)], sizes)
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


class Modules:
    """The modules of a model: the embedding, one block of each kind, and the head. They compute with bound weights, in
    the compute dtype `dtype`. `linear`: class of the linear layers of attention, MLPs and shared experts.
    `tensor_ranks`: as in `Block`."""

    def __init__(
        self,
        model: Model,
        units: Sequence[Unit],
        dtype: torch.dtype,
        *,
        compiled: bool,
        linear: type[nn.Linear] = nn.Linear,
        tensor_ranks: TensorRanks | None = None,
    ) -> None:
        layers = {model.has_experts(layer): layer for layer in range(model.layers)}
        with torch.device("meta"):
            blocks = {kind: Block(model, layer, linear, tensor_ranks) for kind, layer in layers.items()}
            embedding, head = embedding_and_head(model)
        self.head: Head | TiedEmbeddingHead = head
        self._embedding = UnitModule(embedding, units[0])
        self._head = self._embedding if head is embedding else UnitModule(head, units[-1])
        parts = {_part(unit): unit for unit in units if block_of(unit.name) is not None}
        self._parts = {part: UnitModule(blocks[part != "dense"], unit) for part, unit in parts.items()}
        self._blocks = blocks
        self._run_block = {kind: _compiled(block) if compiled else block for kind, block in blocks.items()}
        self._units, self._model, self.hidden, self.dtype = units, model, model.hidden_size, dtype
        self._token_parts = 1 if tensor_ranks is None else tensor_ranks.count
        self.vocabulary_ranks = tensor_ranks if units[0].is_sliced else None
        """Ranks with the other slices of the vocabulary; None: this rank has the whole vocabulary."""
        self._rotations: dict[tuple[int, torch.device], tuple[Tensor, Tensor]] = {}
        self._masks: dict[tuple[int, torch.device], Tensor | None] = {}

    def of(self, unit: int) -> UnitModule:
        """Return the module of a unit. All blocks of one kind share a module; so do all experts, and so do a tied
        embedding and head."""
        if unit == 0:
            return self._embedding
        described = self._units[unit]
        return self._head if described.name == HEAD else self._parts[_part(described)]

    def has_window(self, layer: int) -> bool:
        return self._model.window_of(layer) is not None

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the tokens' embeddings: [B, T] -> [B, T, H]. With slices of the vocabulary, `tokens` are those of all
        K tensor ranks, [B, K T]; see `vocabulary.embed`."""
        if self.vocabulary_ranks is not None:
            return vocabulary.embed(self._embedding.parameters[0], tokens, self.vocabulary_ranks)
        hidden: Tensor = self._embedding.module(tokens)
        return hidden

    def block(
        self,
        hidden: Tensor,
        layer: int,
        statistics: RouterStatistics | None = None,
        scope: Scope | None = None,
        saved: SavedDecision | None = None,
        *,
        is_output_read: bool = True,
    ) -> Tensor:
        """Run the bound block as layer `layer`: [B, T, H] -> [B, T, H]. `scope`: as in `Attention.forward`. `saved`:
        holds the routing decision of an earlier pass, or receives the decision of this pass; None without experts, and
        if the decision is not needed again. `is_output_read`: as in `Block.forward`."""
        run = self._run_block[self._model.has_experts(layer)]
        out: Tensor = run(
            hidden,
            self._rotation(hidden, scope),
            self._mask(hidden, layer, scope),
            statistics,
            self._in_layer(layer, scope),
            saved,
            is_output_read=is_output_read,
        )
        return out

    def keys_and_values(self, hidden: Tensor, layer: int, scope: Scope | None) -> Tensor:
        """Return the keys and values of the bound block as layer `layer`: [B, L, H] -> [B, L, 2 key heads, width].
        `scope`: as in `Attention.forward`."""
        return self._blocks[self._model.has_experts(layer)].keys_and_values(hidden, self._rotation(hidden, scope))

    def route(
        self,
        hidden: Tensor,
        layer: int,
        statistics: RouterStatistics | None = None,
        scope: Scope | None = None,
        decision: RoutingDecision | None = None,
    ) -> RoutedTokens:
        """Run a layer up to its experts, for experts on other ranks: hidden [B, T, H]. `decision`: routing decision of
        an earlier pass."""
        rotation, mask = self._rotation(hidden, scope), self._mask(hidden, layer, scope)
        return self._mixture.route(hidden, rotation, mask, statistics, self._in_layer(layer, scope), decision)

    @property
    def experts(self) -> Experts | TopKExperts:
        """Experts module that all layers share. Converts tokens to rows and rows to tokens, and computes the bound
        experts: all or some of a layer's experts."""
        return self._mixture.experts

    @property
    def _mixture(self) -> Block:
        return self._blocks[True]

    def router_statistics(
        self, layer: int, divisor: int, device: torch.device, choices_of_step: Callable[[], Tensor] | None = None
    ) -> RouterStatistics | None:
        """Return the router statistics of a training pass of this layer; None if the layer has no experts. If
        `choices_of_step` is None, all experts count as chosen equally often."""
        experts = self._model.experts
        if experts is None or not self._model.has_experts(layer):
            return None
        return RouterStatistics.empty(experts.count, divisor, device, choices_of_step)

    def _rotation(self, hidden: Tensor, scope: Scope | None) -> tuple[Tensor, Tensor]:
        length = scope.length if isinstance(scope, SequenceParts) else self._attended(hidden)
        key = (length, hidden.device)
        if key not in self._rotations:
            self._rotations[key] = rotary(self._model, length, hidden)
        rotation = self._rotations[key]
        return rotation if scope is None else rotation_at(rotation, scope.positions)

    def _in_layer(self, layer: int, scope: Scope | None) -> Scope | None:
        """Return the scope with the layer's sliding window."""
        return replace(scope, window=self._model.window_of(layer)) if isinstance(scope, SequenceParts) else scope

    def _mask(self, hidden: Tensor, layer: int, scope: Scope | None) -> Tensor | None:
        window = self._model.window_of(layer)
        if window is None or isinstance(scope, SequenceParts):
            return None
        key = (self._attended(hidden), hidden.device)
        if key not in self._masks:
            self._masks[key] = window_mask(self._attended(hidden), window, hidden)
        return self._masks[key]

    def _attended(self, hidden: Tensor) -> int:
        """Return the number of tokens of a sequence in attention, for this rank's tokens [B, L, H]."""
        return hidden.shape[1] * self._token_parts


def _compiled(block: Block) -> Callable[..., Any]:
    """Return the block's forward function, compiled. Experts are excluded: their numbers of tokens change from pass to
    pass, and torch.compile would compile again for each. Attention within documents is excluded because the lengths of
    documents change, too."""
    block.attention.attend_within = torch.compiler.disable(attend_within)
    if not block.is_mixture:
        return torch.compile(block)
    block.attention.compile()
    return block


def _part(unit: Unit) -> Literal["dense", "mixture", "experts"]:
    """Return the kind of a layer's unit: the block of a layer without experts, the block of a layer with experts, or
    the experts."""
    return "experts" if unit.is_experts else "mixture" if unit.is_of_mixture else "dense"


def _prefix(unit: Unit) -> str:
    block = block_of(unit.name)
    return "" if block is None else f"{block_name(block)}."


def _without_storage(module: nn.Module, name: str) -> nn.Parameter:
    """Replace the named parameter by an empty one, without storage, and return the new parameter."""
    owner, _, leaf = name.rpartition(".")
    parameter = nn.Parameter(torch.empty(0), requires_grad=module.get_parameter(name).requires_grad)
    setattr(module.get_submodule(owner), leaf, parameter)
    return parameter

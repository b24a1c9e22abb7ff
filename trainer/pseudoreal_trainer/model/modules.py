"""The units of a model as modules to which weights are bound."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from pseudoreal_api.spec.model import Model
from torch import Tensor, nn

from pseudoreal_trainer.model.attention import Documents, attend_within, window_mask
from pseudoreal_trainer.model.block import Block, Routed
from pseudoreal_trainer.model.experts import Choice, Experts, Tally
from pseudoreal_trainer.model.head import Head, TiedEnds, ends_of
from pseudoreal_trainer.model.rotary import rotary, rotation_at
from pseudoreal_trainer.model.top_k import TopKExperts
from pseudoreal_trainer.plan.units import HEAD, Unit, block_name, block_of


class UnitModule:
    """One module for all units of a kind, or the part of one that is a unit. `bind` decides whose weights it has."""

    def __init__(self, module: nn.Module, unit: Unit) -> None:
        """`unit`: any unit of the module's kind."""
        self.module = module
        prefix = _prefix(unit)
        names = [parameter.name.removeprefix(prefix) for parameter in unit.parameters]
        self._shapes = [parameter.shape for parameter in unit.parameters]
        self.parameters = [_without_storage(module, name) for name in names]
        self.trained = [parameter for parameter in self.parameters if parameter.requires_grad]
        """Those that gradients train: all but a balancing bias, which is the last."""

    @property
    def numel(self) -> int:
        """Number of elements of all parameters together."""
        return sum(torch.Size(shape).numel() for shape in self._shapes)

    def bind(self, flat: Tensor) -> None:
        """Makes the parameters views of `flat`, a working copy, [at least numel]."""
        for parameter, view in zip(self.parameters, views(flat, self._shapes), strict=True):
            parameter.data = view

    def views(self, flat: Tensor) -> list[Tensor]:
        """Views of a gradient, [at least numel], in the order and shapes of `parameters`."""
        return views(flat, self._shapes)


def views(flat: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """Views of a flat vector as tensors of these shapes, one behind the other."""
    sizes = [torch.Size(shape).numel() for shape in shapes]
    parts = torch.split(flat[: sum(sizes)], sizes)
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


class Modules:
    """The embedding, a block of each kind and the head, over weights that are bound to them, in the compute type
    `dtype`."""

    def __init__(self, model: Model, units: Sequence[Unit], dtype: torch.dtype, *, compiled: bool) -> None:
        layers = {model.has_experts(layer): layer for layer in range(model.layers)}
        with torch.device("meta"):
            blocks = {kind: Block(model, layer) for kind, layer in layers.items()}
            embedding, head = ends_of(model)
        self.head: Head | TiedEnds = head
        self._embedding = UnitModule(embedding, units[0])
        self._head = self._embedding if head is embedding else UnitModule(head, units[-1])
        parts = {_part(unit): unit for unit in units if block_of(unit.name) is not None}
        self._parts = {part: UnitModule(blocks[part != "dense"], unit) for part, unit in parts.items()}
        self._blocks = blocks
        self._run_block = {kind: _compiled(block) if compiled else block for kind, block in blocks.items()}
        self._units, self._model, self.hidden, self.dtype = units, model, model.hidden_size, dtype
        self._rotations: dict[tuple[int, torch.device], tuple[Tensor, Tensor]] = {}
        self._masks: dict[tuple[int, torch.device], Tensor | None] = {}

    def of(self, unit: int) -> UnitModule:
        """The module of a unit; all blocks of a kind have the same, and so have all experts, and tied ends."""
        if unit == 0:
            return self._embedding
        described = self._units[unit]
        return self._head if described.name == HEAD else self._parts[_part(described)]

    def has_window(self, layer: int) -> bool:
        return self._model.window_of(layer) is not None

    def embed(self, tokens: Tensor) -> Tensor:
        """The embedding: [B, T] -> [B, T, H]."""
        hidden: Tensor = self._embedding.module(tokens)
        return hidden

    def block(
        self, hidden: Tensor, layer: int, tally: Tally | None = None, documents: Documents | None = None
    ) -> Tensor:
        """The block that is bound, as this layer uses it: [B, T, H] -> [B, T, H]. `documents`: those that tokens attend
        within; None: whole sequences."""
        run = self._run_block[self._model.has_experts(layer)]
        out: Tensor = run(hidden, self._rotation(hidden, documents), self._mask(hidden, layer), tally, documents)
        return out

    def routed(
        self,
        hidden: Tensor,
        layer: int,
        tally: Tally | None = None,
        documents: Documents | None = None,
        choice: Choice | None = None,
    ) -> Routed:
        """The pass of a layer up to experts on other ranks: hidden [B, T, H]. `choice`: the one that was made
        before."""
        rotation, mask = self._rotation(hidden, documents), self._mask(hidden, layer)
        return self._mixture.routed(hidden, rotation, mask, tally, documents, choice)

    @property
    def experts(self) -> Experts | TopKExperts:
        """Those of all layers: how tokens become rows, and rows tokens; and what the experts whose weights are bound,
        which may be some of them, make of rows."""
        return self._mixture.experts

    @property
    def _mixture(self) -> Block:
        return self._blocks[True]

    def tally(self, layer: int, divisor: int, device: torch.device) -> Tally | None:
        """A tally for a training pass of this layer; None where it has no experts."""
        experts = self._model.experts
        if experts is None or not self._model.has_experts(layer):
            return None
        return Tally.empty(experts.count, divisor, device)

    def _rotation(self, hidden: Tensor, documents: Documents | None) -> tuple[Tensor, Tensor]:
        key = (hidden.shape[1], hidden.device)
        if key not in self._rotations:
            self._rotations[key] = rotary(self._model, hidden.shape[1], hidden)
        rotation = self._rotations[key]
        return rotation if documents is None else rotation_at(rotation, documents.positions)

    def _mask(self, hidden: Tensor, layer: int) -> Tensor | None:
        window = self._model.window_of(layer)
        if window is None:
            return None
        key = (hidden.shape[1], hidden.device)
        if key not in self._masks:
            self._masks[key] = window_mask(hidden.shape[1], window, hidden)
        return self._masks[key]


def _compiled(block: Block) -> Callable[..., Any]:
    """The block's pass, compiled. Experts are left out: their numbers of tokens differ from pass to pass, and
    torch.compile would begin anew for each. So is attention within documents, for the same reason: it alone looks into
    them."""
    block.attention.attend_within = torch.compiler.disable(attend_within)
    if not block.is_mixture:
        return torch.compile(block)
    block.attention.compile()
    return block


def _part(unit: Unit) -> Literal["dense", "mixture", "experts"]:
    """What a unit of a layer is: the block of one without experts, of one with them, or these."""
    return "experts" if unit.is_experts else "mixture" if unit.is_of_mixture else "dense"


def _prefix(unit: Unit) -> str:
    block = block_of(unit.name)
    return "" if block is None else f"{block_name(block)}."


def _without_storage(module: nn.Module, name: str) -> nn.Parameter:
    """Puts an empty parameter in the place of the one with this name."""
    owner, _, leaf = name.rpartition(".")
    parameter = nn.Parameter(torch.empty(0), requires_grad=module.get_parameter(name).requires_grad)
    setattr(module.get_submodule(owner), leaf, parameter)
    return parameter

"""The computation of each kind of unit, over weights that are bound to it: views into a working copy."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from pseudoreal_api.spec.model import Model
from torch import Tensor, nn
from torch.nn import functional as F

from pseudoreal_trainer.model.transformer import Block, Embedding, Head, rotary
from pseudoreal_trainer.plan.units import Unit


class UnitModule:
    """One module for all units of a kind. `bind` decides whose weights it has."""

    def __init__(self, module: nn.Module, unit: Unit) -> None:
        """`unit`: any unit of the module's kind."""
        self.module = module
        prefix = _prefix(unit)
        names = [parameter.name.removeprefix(prefix) for parameter in unit.parameters]
        self._shapes = [parameter.shape for parameter in unit.parameters]
        self.parameters = [_without_storage(module, name) for name in names]

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
    """The three kinds of units, and what they share."""

    def __init__(self, model: Model, units: Sequence[Unit], dtype: torch.dtype, *, compiled: bool) -> None:
        with torch.device("meta"):
            modules = (Embedding(model), Block(model), Head(model))
        self._embedding, self._block, self._head = (
            UnitModule(module, unit) for module, unit in zip(modules, (units[0], units[1], units[-1]), strict=True)
        )
        self._last = len(units) - 1
        self._run_block = _compiled(modules[1]) if compiled else modules[1]
        self._dtype = dtype
        self._head_width = model.hidden_size // model.attention.heads
        self._rotations: dict[tuple[int, torch.device], tuple[Tensor, Tensor]] = {}

    def of(self, unit: int) -> UnitModule:
        return self._embedding if unit == 0 else self._head if unit == self._last else self._block

    def embed(self, tokens: Tensor) -> Tensor:
        """The embedding: [B, T] -> [B, T, H]."""
        hidden: Tensor = self._embedding.module(tokens)
        return hidden

    def block(self, hidden: Tensor) -> Tensor:
        """A block: [B, T, H] -> [B, T, H]."""
        out: Tensor = self._run_block(hidden, self._rotation(hidden))
        return out

    def loss_sum(self, hidden: Tensor, targets: Tensor, dtype: torch.dtype) -> Tensor:
        """The head: hidden states [B, T, H] and targets [B, T] -> sum over all tokens of the negative log likelihood in
        nats, a scalar, computed in `dtype`."""
        logits = self._head.module(hidden)  # [B, T, 256]
        return F.cross_entropy(logits.flatten(0, 1).to(dtype), targets.flatten(), reduction="sum")

    def _rotation(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        key = (hidden.shape[1], hidden.device)
        if key not in self._rotations:
            self._rotations[key] = rotary(hidden.shape[1], self._head_width, hidden)
        return self._rotations[key]


def _compiled(block: Block) -> Callable[..., Any]:
    """The block's pass, compiled. Experts are left out: their numbers of tokens differ from pass to pass, and
    torch.compile would begin anew for each."""
    if not block.is_mixture:
        return torch.compile(block)
    block.attention.compile()
    return block


def _prefix(unit: Unit) -> str:
    return f"{unit.name}." if unit.name.startswith("blocks.") else ""


def _without_storage(module: nn.Module, name: str) -> nn.Parameter:
    """Puts an empty parameter in the place of the one with this name."""
    owner, _, leaf = name.rpartition(".")
    parameter = nn.Parameter(torch.empty(0))
    setattr(module.get_submodule(owner), leaf, parameter)
    return parameter

"""A decoder-only transformer whose layers may share blocks, and its units as modules to which weights are bound."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from pseudoreal_api.spec.model import Model as ModelSpec
from pseudoreal_api.spec.phase import Sharing
from torch import Tensor, nn
from torch.nn import functional as F

from pseudoreal_trainer.model.constants import EPSILON, ROTARY_BASE
from pseudoreal_trainer.model.experts import Experts, Router
from pseudoreal_trainer.model.feed_forward import FeedForward
from pseudoreal_trainer.model.initial import initial_weights
from pseudoreal_trainer.plan.sharing import blocks_of_layers
from pseudoreal_trainer.plan.units import VOCABULARY, Unit, units_of


class Transformer(nn.Module):
    """Byte embedding, pre-norm layers, final norm, untied head. Layer l uses block `layer_blocks[l]`."""

    def __init__(self, spec: ModelSpec, sharing: Sharing) -> None:
        super().__init__()
        self.layer_blocks = blocks_of_layers(sharing, spec.layers)
        self.head_width = spec.hidden_size // spec.attention.heads
        self.embedding = nn.Embedding(VOCABULARY, spec.hidden_size)
        self.blocks = nn.ModuleList(Block(spec) for _ in range(sharing.blocks))
        self.norm = nn.RMSNorm(spec.hidden_size, eps=EPSILON)
        self.head = nn.Linear(spec.hidden_size, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """The logits of the next token: tokens [B, T] -> [B, T, 256]."""
        hidden = self.embedding(tokens)  # [B, T, H]
        rotation = rotary(tokens.shape[1], self.head_width, hidden)
        for block in self.layer_blocks:
            hidden = self.blocks[block](hidden, rotation)
        logits: Tensor = self.head(self.norm(hidden))
        return logits


class Embedding(nn.Module):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, spec.hidden_size)

    def forward(self, tokens: Tensor) -> Tensor:
        """The tokens' embeddings: [B, T] -> [B, T, H]."""
        hidden: Tensor = self.embedding(tokens)
        return hidden


class Head(nn.Module):
    """The final norm and the untied head."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(spec.hidden_size, eps=EPSILON)
        self.head = nn.Linear(spec.hidden_size, VOCABULARY, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """The logits: [B, T, H] -> [B, T, 256]."""
        logits: Tensor = self.head(self.norm(hidden))
        return logits


class Block(nn.Module):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(spec.hidden_size, eps=EPSILON)
        self.attention = Attention(spec.hidden_size, spec.attention.heads)
        self.ffn_norm = nn.RMSNorm(spec.hidden_size, eps=EPSILON)
        if spec.experts is None:
            self.ffn = FeedForward(spec.hidden_size, spec.feed_forward)
        else:
            self.router = Router(spec.hidden_size, spec.experts.count)
            self.experts = Experts(spec, spec.experts)
        self.is_mixture = spec.experts is not None

    def forward(self, hidden: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """The block's output: [B, T, H] -> [B, T, H]."""
        hidden = hidden + self.attention(self.attention_norm(hidden), rotation)
        features = self.ffn_norm(hidden)
        added: Tensor = self.experts(features, self.router(features)) if self.is_mixture else self.ffn(features)
        return hidden + added


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(hidden, hidden, bias=False)
        self.key = nn.Linear(hidden, hidden, bias=False)
        self.value = nn.Linear(hidden, hidden, bias=False)
        self.output = nn.Linear(hidden, hidden, bias=False)

    def forward(self, hidden: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """The attention's output: [B, T, H] -> [B, T, H]."""
        query, key, value = (self._split(part(hidden)) for part in (self.query, self.key, self.value))
        mixed = F.scaled_dot_product_attention(rotate(query, rotation), rotate(key, rotation), value, is_causal=True)
        out: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return out

    def _split(self, hidden: Tensor) -> Tensor:
        """The features by head: [B, T, H] -> [B, heads, T, H / heads]."""
        batch, length, width = hidden.shape
        return hidden.view(batch, length, self.heads, width // self.heads).transpose(1, 2)


def rotary(length: int, width: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the positions' angles, [T, width / 2], in the type of `like` (Su et al. 2021, RoFormer)."""
    exponents = torch.arange(0, width, 2, dtype=torch.float64, device=like.device) / width
    angles = torch.arange(length, dtype=torch.float64, device=like.device)[:, None] * ROTARY_BASE**-exponents
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def rotate(features: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """The features [B, heads, T, width], turned pair by pair: feature i with feature i + width / 2."""
    cosine, sine = (part.to(features.dtype) for part in rotation)
    first, second = features.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)


def build_model(spec: ModelSpec, sharing: Sharing, seed: int, dtype: torch.dtype) -> Transformer:
    """The whole model with its first weights."""
    model = Transformer(spec, sharing).to(dtype)
    for index, unit in enumerate(units_of(spec, sharing.blocks)):
        model.load_state_dict(initial_weights(unit, index, spec.layers, seed, dtype), strict=False)
    return model


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
    """The embedding, a block and the head, over weights that are bound to them, in the compute type `dtype`."""

    def __init__(self, model: ModelSpec, units: Sequence[Unit], dtype: torch.dtype, *, compiled: bool) -> None:
        with torch.device("meta"):
            modules = (Embedding(model), Block(model), Head(model))
        self._embedding, self._block, self._head = (
            UnitModule(module, unit) for module, unit in zip(modules, (units[0], units[1], units[-1]), strict=True)
        )
        self._last = len(units) - 1
        self._run_block = _compiled(modules[1]) if compiled else modules[1]
        self.hidden, self.dtype = model.hidden_size, dtype
        self._head_width = model.hidden_size // model.attention.heads
        self._rotations: dict[tuple[int, torch.device], tuple[Tensor, Tensor]] = {}

    def of(self, unit: int) -> UnitModule:
        """The module of a unit; all blocks have the same."""
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

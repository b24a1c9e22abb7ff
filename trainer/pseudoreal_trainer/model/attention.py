"""Causal self-attention: grouped queries, with norms, biases and a window as the model says."""

import torch
from pseudoreal_api.spec.model import Model
from torch import Tensor, nn
from torch.nn import functional as F

from pseudoreal_trainer.model.norm import norm
from pseudoreal_trainer.model.rotary import rotate


class Attention(nn.Module):
    """Causal self-attention with rotary positions. Head j of the queries attends with head j // (heads / keyValueHeads)
    of the keys and values."""

    def __init__(self, spec: Model) -> None:
        super().__init__()
        hidden, query, key, bias = spec.hidden_size, spec.query_size, spec.key_size, spec.attention.bias
        self.query = nn.Linear(hidden, query, bias=bias != "None")
        self.key = nn.Linear(hidden, key, bias=bias != "None")
        self.value = nn.Linear(hidden, key, bias=bias != "None")
        self.output = nn.Linear(query, hidden, bias=bias == "All")
        self._head_size, self._is_grouped = spec.head_size, query != key
        self._norms_heads = spec.attention.query_key_norm == "PerHead"
        self.query_norm, self.key_norm = _norm(spec, query), _norm(spec, key)

    def forward(self, hidden: Tensor, rotation: tuple[Tensor, Tensor], mask: Tensor | None) -> Tensor:
        """The attention's output: [B, T, H] -> [B, T, H]. `mask`: as `window_mask` makes it; None: each token attends
        to all before it."""
        query = self._split(self.query(hidden), self.query_norm)
        key = self._split(self.key(hidden), self.key_norm)
        value = self._split(self.value(hidden), None)
        mixed = F.scaled_dot_product_attention(
            rotate(query, rotation),
            rotate(key, rotation),
            value,
            attn_mask=mask,
            is_causal=mask is None,
            enable_gqa=self._is_grouped,
        )  # [B, heads, T, width of a head]
        out: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return out

    def _split(self, features: Tensor, norm: nn.Module | None) -> Tensor:
        """The features by head, normalised: [B, T, heads * width] -> [B, heads, T, width]."""
        if norm is not None and not self._norms_heads:
            features = norm(features)
        features = features.unflatten(-1, (-1, self._head_size))
        if norm is not None and self._norms_heads:
            features = norm(features)
        return features.transpose(1, 2)


def _norm(spec: Model, size: int) -> nn.Module | None:
    """The norm of queries or keys, `size` features of all heads; None: the model has none."""
    if spec.attention.query_key_norm == "None":
        return None
    return norm(spec, spec.head_size if spec.attention.query_key_norm == "PerHead" else size)


def window_mask(length: int, window: int, like: Tensor) -> Tensor | None:
    """What is added to the scores of a token [row] for the tokens that it may attend to, [T, T], in the type of `like`:
    0 for itself and the window - 1 before it, minus infinity for all others. None where every token before is in the
    window: attention is then faster without."""
    if length <= window:
        return None
    places = torch.arange(length, device=like.device)
    distance = places[:, None] - places
    seen = (distance >= 0) & (distance < window)
    return torch.zeros(length, length, dtype=like.dtype, device=like.device).masked_fill_(~seen, float("-inf"))

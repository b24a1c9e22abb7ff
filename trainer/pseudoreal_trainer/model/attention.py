"""Causal self-attention: grouped queries, with norms, biases and a window as the model says, over whole sequences or
within the documents in them."""

from dataclasses import dataclass

import torch
from pseudoreal_api.spec.model import Model
from torch import Tensor, nn
from torch.nn import functional as F

from pseudoreal_trainer.model.norm import norm
from pseudoreal_trainer.model.rotary import rotate


@dataclass(frozen=True)
class Documents:
    """The documents in the sequences of a micro-batch, each as far as it lies in its sequence."""

    lengths: tuple[tuple[int, ...], ...]
    """For each sequence the tokens of its documents, in their order; T together."""
    positions: Tensor
    """Place of each token in its document, from 0, [B, T]."""


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
        self.window = spec.attention.window.size if spec.attention.window else None
        self.attend_within = attend_within

    def forward(
        self, hidden: Tensor, rotation: tuple[Tensor, Tensor], mask: Tensor | None, documents: Documents | None = None
    ) -> Tensor:
        """The attention's output: [B, T, H] -> [B, T, H]. `mask`: as `window_mask` makes it; None: each token attends
        to all before it. `documents`: those that tokens attend within; None: whole sequences."""
        query = self._split(self.query(hidden), self.query_norm)
        key = self._split(self.key(hidden), self.key_norm)
        value = self._split(self.value(hidden), None)
        if documents is None or not len(hidden):
            mixed = _attended(
                rotate(query, rotation), rotate(key, rotation), value, mask, is_grouped=self._is_grouped
            )  # [B, heads, T, width of a head]
            mixed = mixed.transpose(1, 2).flatten(2)
        else:
            mixed = self.attend_within(
                documents, rotate(query, rotation), rotate(key, rotation), value, mask, self.window
            )
        out: Tensor = self.output(mixed)
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


def _attended(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, is_grouped: bool) -> Tensor:
    """Values mixed by attention: queries [B, heads, T, w], keys and values [B, key heads, T, w] -> [B, heads, T, w]."""
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=is_grouped
    )


def attend_within(
    documents: Documents, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, window: int | None
) -> Tensor:
    """Values mixed by attention within documents: queries [B, heads, T, w], keys and values [B, key heads, T, w] ->
    [B, T, heads * w], B at least 1. `mask`: that of the window.

    Each document is a call of its own, so no mask of all pairs of tokens is ever made: the kernels are those of whole
    sequences, time grows with the squares of the documents' lengths, and no kernel needs to know documents.
    """
    is_grouped = query.shape[1] != key.shape[1]
    mixed: list[Tensor] = []
    for row, *sequence in zip(documents.lengths, query.split(1), key.split(1), value.split(1), strict=True):
        for length, q, k, v in zip(row, *(features.split([*row], dim=2) for features in sequence), strict=True):
            one = _attended(q, k, v, _corner(mask, length, window), is_grouped=is_grouped)  # [1, heads, length, w]
            mixed.append(one.squeeze(0).transpose(0, 1))
    side_by_side = torch.cat(mixed).flatten(1)  # [B * T, heads * w]
    return side_by_side.view(len(query), -1, side_by_side.shape[1])


def _corner(mask: Tensor | None, length: int, window: int | None) -> Tensor | None:
    """The mask of the windows in a document: distances are the same everywhere, so it is a corner of a longer one's."""
    if mask is None or window is None or length <= window:
        return None
    corner = mask[:length, :length]
    # Kernels of a GPU want rows that begin at multiples of 16 bytes.
    return corner if len(mask) % 16 == 0 else corner.contiguous()


def documents_of(tokens: Tensor, end: int, there: Tensor) -> Documents:
    """The documents in the inputs of a micro-batch, [B, T + 1], each of which ends with the token `end`. `there`: the
    same tokens on the device; the device is not waited for."""
    begins = _begins(tokens, end)
    starts = begins.flatten().nonzero().flatten()
    lengths = torch.diff(starts, append=starts.new_tensor([begins.numel()]))
    rows = lengths.split(begins.sum(dim=1).tolist())
    return Documents(tuple(tuple(row.tolist()) for row in rows), _positions(there, end))


def _positions(tokens: Tensor, end: int) -> Tensor:
    """Place of each input in its document: [B, T + 1] -> [B, T]."""
    begins = _begins(tokens, end)
    places = torch.arange(begins.shape[1], device=tokens.device)
    return places - torch.where(begins, places, 0).cummax(dim=1).values


def _begins(tokens: Tensor, end: int) -> Tensor:
    """Whether a document, or the rest of one, begins at each input: [B, T + 1] -> [B, T]."""
    begins = torch.ones_like(tokens[:, :-1], dtype=torch.bool)
    begins[:, 1:] = tokens[:, :-2] == end
    return begins


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

"""Causal self-attention: grouped-query, with norms, biases and a sliding window if the model has them, over whole
sequences or within documents."""

from dataclasses import dataclass

import torch
from pseudoreal_api.spec.model import Model
from torch import Tensor, nn
from torch.nn import functional as F

from pseudoreal_trainer.model.layers import rms_norm
from pseudoreal_trainer.model.rotary import rotate


@dataclass(frozen=True)
class Documents:
    """Documents in the sequences of a micro-batch. If a sequence cuts a document, only the part inside the sequence
    counts."""

    lengths: tuple[tuple[int, ...], ...]
    """Lengths in tokens of the documents of each sequence, in order; the lengths of a sequence add up to T."""
    positions: Tensor
    """Position of each token in its document, from 0, [B, T]."""


class Attention(nn.Module):
    """Causal self-attention with rotary positions. Query head j uses key and value head j // (heads /
    keyValueHeads)."""

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
        self.attend_within = attend_within  # an attribute, so that `modules` can exclude it from torch.compile

    def forward(
        self, hidden: Tensor, rotation: tuple[Tensor, Tensor], mask: Tensor | None, documents: Documents | None = None
    ) -> Tensor:
        """Return the attention's output: [B, T, H] -> [B, T, H].

        `mask`: from `window_mask`; None: each token attends to all tokens before it. `documents`: attention stays
        within them; None: whole sequences.
        """
        query = self._split_heads(self.query(hidden), self.query_norm)
        key = self._split_heads(self.key(hidden), self.key_norm)
        value = self._split_heads(self.value(hidden), None)
        if documents is None or not len(hidden):
            mixed = _attend(
                rotate(query, rotation), rotate(key, rotation), value, mask, is_grouped=self._is_grouped
            )  # [B, heads, T, width of a head]
            mixed = mixed.transpose(1, 2).flatten(2)
        else:
            mixed = self.attend_within(
                documents, rotate(query, rotation), rotate(key, rotation), value, mask, self.window
            )
        out: Tensor = self.output(mixed)
        return out

    def _split_heads(self, features: Tensor, norm: nn.Module | None) -> Tensor:
        """Return the features split into heads, normalized if `norm` is given: [B, T, heads * width] -> [B, heads, T,
        width]."""
        if norm is not None and not self._norms_heads:
            features = norm(features)
        features = features.unflatten(-1, (-1, self._head_size))
        if norm is not None and self._norms_heads:
            features = norm(features)
        return features.transpose(1, 2)


def _norm(spec: Model, size: int) -> nn.Module | None:
    """Return the norm of queries or keys with `size` features over all heads; None if the model has none."""
    if spec.attention.query_key_norm == "None":
        return None
    return rms_norm(spec, spec.head_size if spec.attention.query_key_norm == "PerHead" else size)


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, is_grouped: bool) -> Tensor:
    """Return values mixed by attention: queries [B, heads, T, w], keys and values [B, key heads, T, w] -> [B, heads, T,
    w]."""
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=is_grouped
    )


def attend_within(
    documents: Documents, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, window: int | None
) -> Tensor:
    """Return values mixed by attention within documents: queries [B, heads, T, w], keys and values [B, key heads, T, w]
    -> [B, T, heads * w], B at least 1. `mask`: from `window_mask`. `window`: size of the sliding window in tokens;
    None: no window.

    Attention is called once per document, with the kernels for whole sequences. No mask over all pairs of tokens is
    needed, and the time grows with the squares of the documents' lengths.
    """
    is_grouped = query.shape[1] != key.shape[1]
    mixed: list[Tensor] = []
    for row, *sequence in zip(documents.lengths, query.split(1), key.split(1), value.split(1), strict=True):
        for length, q, k, v in zip(row, *(features.split([*row], dim=2) for features in sequence), strict=True):
            one = _attend(q, k, v, _document_mask(mask, length, window), is_grouped=is_grouped)  # [1, heads, length, w]
            mixed.append(one.squeeze(0).transpose(0, 1))
    side_by_side = torch.cat(mixed).flatten(1)  # [B * T, heads * w]
    return side_by_side.view(len(query), -1, side_by_side.shape[1])


def _document_mask(mask: Tensor | None, length: int, window: int | None) -> Tensor | None:
    """Return the window mask of a document; None if no mask is needed. The result is a corner of `mask`, because a
    window mask depends only on the distance of two tokens."""
    if mask is None or window is None or length <= window:
        return None
    corner = mask[:length, :length]
    # GPU kernels want rows that start at multiples of 16 bytes.
    return corner if len(mask) % 16 == 0 else corner.contiguous()


def find_documents(tokens: Tensor, end: int, on_device: Tensor) -> Documents:
    """Return the documents of a micro-batch from its tokens, [B, T + 1]: T inputs per sequence and the last target.
    Each document ends with the token `end`. `on_device`: the same tokens on the device. Does not wait for the
    device."""
    is_start = _is_document_start(tokens, end)
    starts = is_start.flatten().nonzero().flatten()
    lengths = torch.diff(starts, append=starts.new_tensor([is_start.numel()]))
    rows = lengths.split(is_start.sum(dim=1).tolist())
    return Documents(tuple(tuple(row.tolist()) for row in rows), _positions(on_device, end))


def _positions(tokens: Tensor, end: int) -> Tensor:
    """Return the position of each input in its document: [B, T + 1] -> [B, T]."""
    is_start = _is_document_start(tokens, end)
    positions = torch.arange(is_start.shape[1], device=tokens.device)
    return positions - torch.where(is_start, positions, 0).cummax(dim=1).values


def _is_document_start(tokens: Tensor, end: int) -> Tensor:
    """Return True for each input at which a document, or the rest of a document, starts: [B, T + 1] -> [B, T]."""
    is_start = torch.ones_like(tokens[:, :-1], dtype=torch.bool)
    is_start[:, 1:] = tokens[:, :-2] == end
    return is_start


def window_mask(length: int, window: int, like: Tensor) -> Tensor | None:
    """Return the additive mask of a sliding window, [T, T], in the dtype of `like`.

    Row t is 0 for token t and the window - 1 tokens before it, minus infinity for all others. None if the window covers
    all earlier tokens: attention is faster without a mask.
    """
    if length <= window:
        return None
    positions = torch.arange(length, device=like.device)
    distance = positions[:, None] - positions
    seen = (distance >= 0) & (distance < window)
    return torch.zeros(length, length, dtype=like.dtype, device=like.device).masked_fill_(~seen, float("-inf"))

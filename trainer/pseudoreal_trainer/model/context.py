"""Attention of local queries to keys and values of whole sequences. All other operations of a layer compute each token
on its own.

The queries of a pass are one part of each sequence: the part of a context rank (context parallelism), or one of several
chunks that a rank computes one after the other (`engine.chunks`).

With C context ranks, a sequence is cut into 2 C chunks of equal length. Rank r computes the chunks r and 2 C - 1 - r:
an early chunk attends to few tokens, a late chunk to many. So causal attention takes the same time on all ranks (Llama
3, arXiv 2407.21783, section 3.3.2), except with documents or windows. Each rank gathers the keys and values of all
ranks and attends with its local queries. In models with grouped heads, keys and values have fewer features than
queries.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right


@dataclass(frozen=True)
class ContextCut:
    """Cut of each sequence into the parts of the context ranks, from the point of view of one rank."""

    ranks: int
    rank: int
    """Index of this rank among the context ranks."""
    length: int
    """Number of tokens of a sequence, T; a multiple of twice the number of ranks."""

    def __post_init__(self) -> None:
        assert self.length % (2 * self.ranks) == 0, "the job's rules allow only lengths with equal chunks"

    @property
    def chunk(self) -> int:
        """Number of tokens of a chunk."""
        return self.length // (2 * self.ranks)

    @cached_property
    def chunks(self) -> tuple[range, range]:
        """Indices in the sequence of the tokens of this rank's two chunks: the early chunk, then the late one. The
        rank's tensors have the same order."""
        starts = (self.rank * self.chunk, self.length - (self.rank + 1) * self.chunk)
        return range(starts[0], starts[0] + self.chunk), range(starts[1], starts[1] + self.chunk)

    def index_of(self, token: int) -> int | None:
        """Return the index of a token of the sequence in this rank's part; None if another rank has it."""
        found = (n * self.chunk + chunk.index(token) for n, chunk in enumerate(self.chunks) if token in chunk)
        return next(found, None)

    def own(self, tensor: Tensor) -> Tensor:
        """Return this rank's part of a tensor: [B, T, ...] -> [B, T / C, ...]."""
        return torch.cat([tensor[:, chunk.start : chunk.stop] for chunk in self.chunks], dim=1)

    def joined(self, parts: Tensor) -> Tensor:
        """Return whole sequences for the parts of all context ranks, rank 0 first: [C, B, T / C, ...] -> [B, T, ...].
        The tokens of a sequence are in order."""
        early, late = parts.unflatten(2, (2, self.chunk)).unbind(2)  # [C, B, T / 2C, ...]
        return torch.cat([early, late.flip(0)]).transpose(0, 1).flatten(1, 2)

    def parts(self, whole: Tensor) -> Tensor:
        """Cut whole sequences into the parts of all context ranks, rank 0 first: [B, T, ...] -> [C, B, T / C, ...]. The
        inverse of `joined`."""
        early, late = whole.unflatten(1, (2, self.ranks, self.chunk)).unbind(1)  # [B, C, T / 2C, ...]
        return torch.stack([early, late.flip(1)], dim=2).flatten(2, 3).transpose(0, 1).contiguous()


@dataclass(frozen=True)
class Span:
    """Consecutive queries from one document in a part of a sequence, with their keys in the whole sequence."""

    queries: range
    """Indices of the queries in the part."""
    keys: range
    """Indices of the keys in the sequence: from the document's first token to the last query's token."""


def spans_of(tokens: Sequence[range], lengths: Sequence[int]) -> tuple[Span, ...]:
    """Return the spans of a part of a sequence. `tokens`: the part's ranges of tokens, as indices in the sequence, in
    the part's order. `lengths`: lengths in tokens of the sequence's documents, in order; a sequence without documents
    counts as one document."""
    found, before = list[Span](), 0
    documents = [*pairwise(accumulate(lengths, initial=0))]
    for own in tokens:
        shift, before = before - own.start, before + len(own)
        for begin, end in documents:
            first, last = max(begin, own.start), min(end, own.stop)
            if first < last:
                found.append(Span(range(first + shift, last + shift), range(begin, last)))
    return tuple(found)


def sub_ranges(tokens: Sequence[range], begin: int, end: int) -> list[range]:
    """Return the ranges of tokens in the slice [begin:end] of a part. `tokens`: the part's ranges, as in `spans_of`."""
    found, before = [], 0
    for own in tokens:
        first, last = max(begin - before, 0), min(end - before, len(own))
        if first < last:
            found.append(own[first:last])
        before += len(own)
    return found


@dataclass(frozen=True)
class SequenceParts:
    """Parts of the sequences of a micro-batch."""

    length: int
    """Number of tokens of a whole sequence, T."""
    spans: tuple[tuple[Span, ...], ...]
    """Entry b: spans of sequence b. A single entry: spans of each sequence."""
    positions: Tensor
    """Rotary position of each of the part's L tokens. Within documents, [B, L]: counted from the document's start, from
    0. Otherwise [L], the same for all sequences: counted from the sequence's start."""
    whole: Callable[[Tensor], Tensor] | None
    """Returns keys and values of whole sequences for keys and values of the parts, [B, L, ...] -> [B, T, ...], with
    gradient. Collective over the context ranks. None: passes over the parts get `keys_and_values`."""
    keys_and_values: Tensor | None = None
    """Keys and values of whole sequences, [B, T, 2 key heads, w], keys first; None: to be computed by `whole`."""
    window: int | None = None
    """Size of the layer's sliding window in tokens; None: no window."""


def attend_in_parts(parts: SequenceParts, query: Tensor, keys_and_values: Tensor) -> Tensor:
    """Return values mixed by causal attention: queries [B, L, heads, w] of the parts, and keys and values [B, T, 2 key
    heads, w] of whole sequences -> [B, L, heads, w]."""
    # Without cuDNN, which builds a plan for each new length.
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        if len(parts.spans) == 1:
            return _attend_to_spans(parts.spans[0], query, keys_and_values, parts.window)
        rows = zip(parts.spans, query.split(1), keys_and_values.split(1), strict=True)
        return torch.cat([_attend_to_spans(spans, q, kv, parts.window) for spans, q, kv in rows])


def _attend_to_spans(spans: Sequence[Span], query: Tensor, keys_and_values: Tensor, window: int | None) -> Tensor:
    """Return the mixed values of one part's queries, span by span. The spans cover the part in order.
    `keys_and_values`: of whole sequences."""
    queries = query.split([len(span.queries) for span in spans], dim=1)
    others = _Slices.apply(keys_and_values, [_keys(span, window) for span in spans])
    return torch.cat([_attend(q, kv, window) for q, kv in zip(queries, others, strict=True)], dim=1)


def _keys(span: Span, window: int | None) -> range:
    """Return the keys in the window of at least one query of the span: from window - 1 tokens before the first query,
    but not before the document's first token, to the last query. Without a window: all keys of the span."""
    if window is None:
        return span.keys
    return range(max(span.keys.start, span.keys.stop - len(span.queries) - window + 1), span.keys.stop)


class _Slices(torch.autograd.Function):
    """Slices of a tensor [B, T, ...] along T, possibly overlapping. The backward pass adds all their gradients in one
    tensor; with torch's own slices it would fill a tensor of T tokens for each slice."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, tokens: Sequence[range]) -> tuple[Tensor, ...]:
        ctx.shape, ctx.tokens = whole.shape, tokens
        return tuple(whole[:, own.start : own.stop] for own in tokens)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        out = gradients[0].new_zeros(ctx.shape)
        for own, gradient in zip(ctx.tokens, gradients, strict=True):
            out[:, own.start : own.stop] += gradient
        return out, None


def _attend(query: Tensor, keys_and_values: Tensor, window: int | None) -> Tensor:
    key, value = keys_and_values.chunk(2, dim=2)
    queries, keys = query.shape[1], key.shape[1]
    mixed = F.scaled_dot_product_attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        attn_mask=_mask(queries, keys, window, query.device),
        is_causal=_is_square(queries, keys, window),
        enable_gqa=query.shape[2] != key.shape[2],
    )  # [B, heads, queries, w]
    return mixed.transpose(1, 2)


def _is_square(queries: int, keys: int, window: int | None) -> bool:
    """Return whether attention needs no mask besides torch's `is_causal`, which aligns the first query with the first
    key."""
    return queries == keys and (window is None or keys <= window)


def _mask(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor | None:
    """Return the mask of queries at the end of the keys: the last query and the last key are the same token. None:
    `is_causal` is enough."""
    if _is_square(queries, keys, window):
        return None
    if (window is None or keys <= window) and device.type != "cpu":
        return causal_lower_right(queries, keys)  # a description, with which flash attention needs no mask in memory
    places = torch.arange(queries, device=device)[:, None] + (keys - queries)
    others = torch.arange(keys, device=device)
    seen = others <= places
    return seen if window is None else seen & (others > places - window)

"""Attention of a part of each sequence, with keys and values of whole sequences. All other parts of a layer compute
each token for itself.

The parts are on different ranks (context parallelism), or a rank computes them one after the other. For context
parallelism, a sequence is cut into 2 C chunks of equal length, where C is the number of context ranks. Rank r computes
the chunks r and 2 C - 1 - r: an early chunk, which attends to few tokens, and a late chunk, which attends to many. So
causal attention takes all ranks the same time (Llama 3, arXiv 2407.21783, section 3.3.2). The ranks gather keys and
values, which have fewer features than queries in models with grouped heads, and attend with their own queries.
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
        """Tokens of this rank's chunks, in the order in which the rank has them."""
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
        """Return whole sequences from the parts of all ranks: [C, B, T / C, ...] -> [B, T, ...]."""
        early, late = parts.unflatten(2, (2, self.chunk)).unbind(2)  # [C, B, T / 2C, ...]
        return torch.cat([early, late.flip(0)]).transpose(0, 1).flatten(1, 2)

    def parts(self, whole: Tensor) -> Tensor:
        """Return the parts of all ranks: [B, T, ...] -> [C, B, T / C, ...]; the inverse of `joined`."""
        early, late = whole.unflatten(1, (2, self.ranks, self.chunk)).unbind(1)  # [B, C, T / 2C, ...]
        return torch.stack([early, late.flip(1)], dim=2).flatten(2, 3).transpose(0, 1).contiguous()


@dataclass(frozen=True)
class Span:
    """Neighbouring tokens of one document in a part of a sequence, and the tokens to which these tokens attend."""

    queries: range
    """Indices of the tokens in the part."""
    keys: range
    """Indices in the sequence, from the first token of the document to the span's last token."""


def spans_of(tokens: Sequence[range], lengths: Sequence[int]) -> tuple[Span, ...]:
    """Return the spans of a part of a sequence. `tokens`: ranges of tokens of the sequence, in the order in which the
    part has them. `lengths`: lengths in tokens of the sequence's documents, in order; a sequence without documents
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
    """Return the ranges of the tokens from index `begin` up to `end` of a part with these ranges of tokens."""
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
    """Position of each token of the part in its document, from 0: [B, L], or [L] if all sequences have the same."""
    whole: Callable[[Tensor], Tensor]
    """Returns keys and values of whole sequences for keys and values of the parts, [B, L, ...] -> [B, T, ...], with
    gradient. Collective over the context ranks."""
    keys_and_values: Tensor | None = None
    """Keys and values of whole sequences, [B, T, 2 key heads, w], keys first; None: to be computed."""
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
    """Attend with queries of these spans, which cover the part; `keys_and_values`: of whole sequences."""
    queries = query.split([len(span.queries) for span in spans], dim=1)
    others = _Slices.apply(keys_and_values, [_keys(span, window) for span in spans])
    return torch.cat([_attend(q, kv, window) for q, kv in zip(queries, others, strict=True)], dim=1)


def _keys(span: Span, window: int | None) -> range:
    """Return the tokens to which some query of the span attends. Its first query attends to the window - 1 tokens
    before itself."""
    if window is None:
        return span.keys
    return range(max(span.keys.start, span.keys.stop - len(span.queries) - window + 1), span.keys.stop)


class _Slices(torch.autograd.Function):
    """Slices of a tensor [B, T, ...], which may overlap. Each backward pass of torch's own slices would fill a tensor
    for all T tokens."""

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
    """Return whether the causal mask of torch's kernels, which aligns the first query with the first key, is right."""
    return queries == keys and (window is None or keys <= window)


def _mask(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor | None:
    """Return the mask of queries whose last token is the last of the keys; None for the causal mask of torch's
    kernels."""
    if _is_square(queries, keys, window):
        return None
    if (window is None or keys <= window) and device.type != "cpu":
        return causal_lower_right(queries, keys)  # a description, with which flash attention needs no mask in memory
    places = torch.arange(queries, device=device)[:, None] + (keys - queries)
    others = torch.arange(keys, device=device)
    seen = others <= places
    return seen if window is None else seen & (others > places - window)

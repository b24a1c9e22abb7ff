"""Causal self-attention: grouped-query, with norms, biases and a sliding window if the model has them, over whole
sequences or within documents.

Queries, keys and values stay in the layout of their projections, [B, T, heads, width]. Torch's kernels read this layout
and return their output in the layout of the query, so heads are side by side before and after without a copy.
"""

import inspect
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from pseudoreal_api.spec.model import Model
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from pseudoreal_trainer.model.context import SequenceParts, attend_in_parts
from pseudoreal_trainer.model.layers import project, rms_norm
from pseudoreal_trainer.model.rotary import rotate
from pseudoreal_trainer.model.tensor import TensorRanks, own_key_head, sliced_model


@dataclass(frozen=True)
class Documents:
    """Documents in the sequences of a micro-batch. If a sequence cuts a document, only the part inside the sequence
    counts."""

    lengths: tuple[tuple[int, ...], ...]
    """Lengths in tokens of the documents of each sequence, in order; the lengths of a sequence add up to T."""
    positions: Tensor
    """Position of each token in its document, from 0, [B, T]."""
    bounds: Tensor
    """Index of the first token of each document, with tokens counted over all sequences, and then the number of all
    tokens: [D + 1], int32, on the device. D is the number of documents, rounded up to a power of two; the documents
    added are empty and come last."""
    longest: int
    """Upper bound of the documents' lengths: the greatest length, rounded up to a power of two, or T if that is
    less."""


Scope = Documents | SequenceParts
"""Scope of causal attention in a micro-batch. Documents: each token attends within its document. SequenceParts: this
pass has the queries of one part of each sequence, and each query attends within its document, or within its whole
sequence without documents. None instead of a scope: each token attends within its whole sequence."""


class Attention(nn.Module):
    """Causal self-attention with rotary positions. Query head j uses key and value head j // (heads /
    keyValueHeads)."""

    def __init__(
        self, whole: Model, linear: type[nn.Linear] = nn.Linear, tensor_ranks: TensorRanks | None = None
    ) -> None:
        """`linear`: class of the projections. `tensor_ranks`: ranks with the other heads; None: this rank has all
        heads."""
        super().__init__()
        spec = sliced_model(whole, tensor_ranks)
        hidden, query, key, bias = spec.hidden_size, spec.query_size, spec.key_size, spec.attention.bias
        self.query = linear(hidden, query, bias=bias != "None")
        self.key = linear(hidden, key, bias=bias != "None")
        self.value = linear(hidden, key, bias=bias != "None")
        self.output = linear(query, hidden, bias=bias == "All")
        self._tensor_ranks, self._own_key_head = tensor_ranks, own_key_head(whole, tensor_ranks)
        self._head_size = spec.head_size
        self._is_grouped = query != (key if self._own_key_head is None else spec.head_size)
        self._norms_heads = spec.attention.query_key_norm == "PerHead"
        self.query_norm, self.key_norm = _norm(spec, query), _norm(spec, key)
        self.window = spec.attention.window.size if spec.attention.window else None
        self.attend_within = attend_within  # an attribute, so that `modules` can exclude it from torch.compile

    def forward(
        self, hidden: Tensor, rotation: tuple[Tensor, Tensor], mask: Tensor | None, scope: Scope | None = None
    ) -> Tensor:
        """Return the attention's output: [B, T, H] -> [B, T, H].

        `mask`: sliding window [T, T], from `window_mask`; None: no window, or a window over all earlier tokens.
        `scope`: documents, or parts of sequences; None: whole sequences. Parts of sequences contain the window, and
        need no mask. With K tensor ranks, `hidden` and the output have this rank's tokens, [B, T / K, H].
        """
        if self._tensor_ranks is not None:
            hidden = self._tensor_ranks.gather(hidden)
        query = rotate(self._split_heads(self.query(hidden), self.query_norm), rotation)
        if isinstance(scope, SequenceParts) and scope.keys_and_values is not None:
            return self._project(attend_in_parts(scope, query, scope.keys_and_values))
        key, value = self._keys(hidden, rotation), self._values(hidden)
        if scope is None or not len(hidden):
            mixed = _attend(query, key, value, mask, is_grouped=self._is_grouped)
        else:
            mixed = self.attend_within(scope, query, key, value, mask, self.window)
        return self._project(mixed)

    def keys_and_values(self, hidden: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """Return the rotated keys and the values, side by side: [B, T, H] -> [B, T, 2 key heads, width]."""
        return torch.cat([self._keys(hidden, rotation), self._values(hidden)], dim=2)

    def _keys(self, hidden: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        return rotate(self._split_heads(self._of_own_queries(self.key, hidden), self.key_norm), rotation)

    def _values(self, hidden: Tensor) -> Tensor:
        return self._split_heads(self._of_own_queries(self.value, hidden), None)

    def _of_own_queries(self, projection: nn.Linear, hidden: Tensor) -> Tensor:
        """Return the keys or values of the heads that this rank's queries use: [B, T, H] -> [B, T, heads * width]."""
        if self._own_key_head is None:
            out: Tensor = projection(hidden)
            return out
        rows = slice(self._own_key_head * self._head_size, (self._own_key_head + 1) * self._head_size)
        bias = None if projection.bias is None else projection.bias[rows]
        return F.linear(hidden, projection.weight[rows], bias)

    def _project(self, mixed: Tensor) -> Tensor:
        """Return the output projection of mixed values: [B, T, heads, width] -> [B, T, H]."""
        return project(self.output, mixed.flatten(2), self._tensor_ranks)

    def _split_heads(self, features: Tensor, norm: nn.Module | None) -> Tensor:
        """Return the features split into heads, normalized if `norm` is given: [B, T, heads * width] -> [B, T, heads,
        width]."""
        if norm is not None and not self._norms_heads:
            features = norm(features)
        features = features.unflatten(-1, (-1, self._head_size))
        if norm is not None and self._norms_heads:
            features = norm(features)
        return features


def _norm(spec: Model, size: int) -> nn.Module | None:
    """Return the norm of queries or keys with `size` features over all heads; None if the model has none."""
    if spec.attention.query_key_norm == "None":
        return None
    return rms_norm(spec, spec.head_size if spec.attention.query_key_norm == "PerHead" else size)


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, is_grouped: bool) -> Tensor:
    """Return values mixed by attention: queries [B, T, heads, w], keys and values [B, T, key heads, w] -> [B, T, heads,
    w]."""
    mixed = F.scaled_dot_product_attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        attn_mask=mask,
        is_causal=mask is None,
        enable_gqa=is_grouped,
    )  # [B, heads, T, w]
    return mixed.transpose(1, 2)


def attend_within(
    scope: Scope, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, window: int | None
) -> Tensor:
    """Return values mixed by attention within documents, or in parts of sequences: queries [B, T, heads, w], keys and
    values [B, T, key heads, w] -> [B, T, heads, w], B at least 1. `mask`: from `window_mask`. `window`: size of the
    sliding window in tokens; None: no window.

    No mask over all pairs of tokens is needed, and the time grows with the squares of the documents' lengths.
    """
    if isinstance(scope, SequenceParts):
        assert scope.whole is not None, "chunks of a part have their keys and values"
        return attend_in_parts(scope, query, scope.whole(torch.cat([key, value], dim=2)))
    documents = scope
    heads, width = query.shape[2:]
    if varlen_obstacle(query.device, query.dtype, heads, key.shape[2], width) is None:
        # Without a mask, the layer has no window, or the window covers a whole sequence.
        return _attend_to_all_documents(documents, query, key, value, None if mask is None else window)
    return _attend_to_each_document(documents, query, key, value, mask, window)


@cache
def varlen_obstacle(device: torch.device, dtype: torch.dtype, heads: int, key_heads: int, width: int) -> str | None:
    """Return why attention within documents calls a kernel for each document; None if one call of torch's attention
    with variable lengths computes all documents of a micro-batch. `width`: features of a head."""
    if device.type != "cuda":
        return f"torch has attention with variable lengths for CUDA devices, not for {device.type}"
    if width % 8:
        return f"flash attention needs heads whose width is a multiple of 8, and these have {width} features"
    # Imported here, because the module imports torch's compiler, which takes seconds.
    from torch.nn.attention.varlen import varlen_attn

    missing = {"window_size", *_grouped_option(heads, key_heads)} - inspect.signature(varlen_attn).parameters.keys()
    if missing:
        return f"attention with variable lengths in torch {torch.__version__} has no {' and no '.join(sorted(missing))}"
    query, key = (
        torch.empty(1, number, 1, width, dtype=dtype, device=device, requires_grad=True)
        for number in (heads, key_heads)
    )
    sample = torch.backends.cuda.SDPAParams(query, key, key, None, 0.0, True, heads != key_heads)
    if not torch.backends.cuda.can_use_flash_attention(sample):
        return f"flash attention does not take heads of {width} features in {dtype} on this GPU"
    return None


def _grouped_option(heads: int, key_heads: int) -> dict[str, Any]:
    """Return the option of `varlen_attn` for fewer key heads than heads. torch before 2.12 has no such option."""
    return {} if heads == key_heads else {"enable_gqa": True}


def _attend_to_all_documents(
    documents: Documents, query: Tensor, key: Tensor, value: Tensor, window: int | None
) -> Tensor:
    """Attend in one call for all documents; arguments and result as in `attend_within`.

    Flash attention is built into torch for any lengths. The alternative, cuDNN, builds a plan of 0.06 to 0.5 s for each
    new shape, takes no windows, and may wait for the device, which may wait for a message that this rank sends later.
    Two numbers make up the shape of a call, `documents.longest` and the length of `documents.bounds`, and both are
    powers of two or constant, so a phase has few shapes.
    """
    from torch.nn.attention.varlen import varlen_attn

    before = -1 if window is None or window >= documents.longest else window - 1
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        mixed = varlen_attn(
            query.flatten(0, 1),
            key.flatten(0, 1),
            value.flatten(0, 1),
            documents.bounds,
            documents.bounds,
            documents.longest,
            documents.longest,
            window_size=(before, 0),  # tokens that a token attends to before and after itself; -1: all of them
            **_grouped_option(query.shape[2], key.shape[2]),
        )
    assert isinstance(mixed, Tensor), "without `return_aux` the output is one tensor"
    return mixed.view_as(query)


def _attend_to_each_document(
    documents: Documents, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, window: int | None
) -> Tensor:
    """Attend in one call per document, with the kernels for whole sequences; arguments and result as in
    `attend_within`."""
    is_grouped = query.shape[2] != key.shape[2]
    mixed: list[Tensor] = []
    # Without cuDNN, which builds a plan for each new length.
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        for row, *sequence in zip(documents.lengths, query.split(1), key.split(1), value.split(1), strict=True):
            for length, q, k, v in zip(row, *(features.split([*row], dim=1) for features in sequence), strict=True):
                mixed.append(_attend(q, k, v, _document_mask(mask, length, window), is_grouped=is_grouped).squeeze(0))
    return torch.cat(mixed).view_as(query)


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
    of_rows = tuple(tuple(row.tolist()) for row in rows)
    longest = min(_power_of_two(max(map(max, of_rows), default=1)), max(1, is_start.shape[1]))
    return Documents(of_rows, _positions(on_device, end), _bounds(on_device, end, _power_of_two(len(starts))), longest)


def _bounds(tokens: Tensor, end: int, documents: int) -> Tensor:
    """Return `Documents.bounds` for this number of documents, empty ones included: [B, T + 1] -> [documents + 1]. The
    number is known, so nothing is read back from the device."""
    is_start = _is_document_start(tokens, end).flatten()
    bounds = torch.nonzero_static(is_start, size=documents + 1, fill_value=len(is_start))
    return bounds.flatten().to(torch.int32)


def _power_of_two(number: int) -> int:
    """Return the least power of two that is at least `number` and at least 1."""
    return 1 << max(0, number - 1).bit_length()


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

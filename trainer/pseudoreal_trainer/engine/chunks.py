"""A layer computed in chunks of the sequence, so its graph has the tensors of only one chunk (StreamBP, arXiv
2506.03077).

Keys and values of whole sequences are computed first, without a graph. Each chunk then passes through the layer with
its own queries. The backward pass recomputes one chunk after the other, adds up the gradients of keys and values over
the chunks, and finally goes back through the keys and values. The result is the same as in a pass over the whole
sequences, up to the order of sums.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from pseudoreal_trainer.engine.ranks.context import PartExchange
from pseudoreal_trainer.model.attention import Documents, Scope
from pseudoreal_trainer.model.context import ContextCut, SequenceParts, spans_of, sub_ranges
from pseudoreal_trainer.model.modules import Modules


@dataclass(frozen=True)
class Chunk:
    """Neighbouring tokens of this rank's part of each sequence."""

    begin: int
    end: int
    parts: SequenceParts

    def of(self, tensor: Tensor) -> Tensor:
        """Return the chunk of a tensor, [B, L, ...] -> [B, end - begin, ...]."""
        return tensor[:, self.begin : self.end]


def parts_of(
    tokens: Sequence[range],
    length: int,
    documents: Documents | None,
    device: torch.device,
    whole: Callable[[Tensor], Tensor] | None,
) -> SequenceParts:
    """Return one part of each sequence: the ranges `tokens`, as indices in the sequence. `length`: number of tokens of
    a whole sequence. `documents`: documents of the whole sequences; None: attention spans whole sequences. `whole`: as
    in `SequenceParts`."""
    if documents is None:
        positions = torch.cat([torch.arange(own.start, own.stop, device=device) for own in tokens])
        return SequenceParts(length, (spans_of(tokens, [length]),), positions, whole)
    spans = tuple(spans_of(tokens, lengths) for lengths in documents.lengths)
    positions = torch.cat([documents.positions[:, own.start : own.stop] for own in tokens], dim=1)
    return SequenceParts(length, spans, positions, whole)


def chunks_of(
    tokens: Sequence[range], length: int, documents: Documents | None, count: int, device: torch.device
) -> list[Chunk]:
    """Return the parts with the ranges `tokens`, in `count` chunks of nearly equal length; parts with fewer tokens than
    `count` have one chunk per token. `tokens`, `length`, `documents`: as in `parts_of`."""
    own = sum(map(len, tokens))
    bounds = pairwise(own * index // count for index in range(count + 1))
    return [
        Chunk(begin, end, parts_of(sub_ranges(tokens, begin, end), length, documents, device, None))
        for begin, end in bounds
        if begin < end
    ]


@dataclass(frozen=True)
class ChunkedLayer:
    """A dense layer with a bound module, computed in chunks of the sequence. Main thread only."""

    modules: Modules
    layer: int
    chunks: Sequence[Chunk]
    """Chunks of this rank's parts of the sequences, in order."""
    scope: Scope | None
    """Scope of attention in the layer computed at once; gives the rotary positions of the keys."""
    cut: ContextCut | None
    """Cut of the sequences over context ranks; None: this rank has whole sequences."""
    context: PartExchange

    def forward(self, source: Tensor) -> Tensor:
        """Return the layer's output without a graph, [B, L, H] -> [B, L, H]."""
        keys = self._whole(self._keys_and_values(source))
        out = torch.empty_like(source)
        for chunk in self.chunks:
            out[:, chunk.begin : chunk.end] = self._run(chunk, chunk.of(source), keys, is_output_read=True)
        return out

    def backward(
        self,
        source: Tensor,
        gradient: Tensor,
        trained: Sequence[Tensor],
        take: Callable[[Sequence[Tensor | None]], None],
    ) -> Tensor:
        """Return the gradient of the layer's input `source` for the gradient of its output, both [B, L, H].

        `trained`: parameters of the layer. `take`: takes one gradient for each of them, or None, and adds them up;
        called once for each chunk and once more.
        """
        with torch.no_grad():
            keys = self._whole(self._keys_and_values(source)).requires_grad_()
        of_source = torch.empty_like(source)
        # Summed in at least float32, as gradients of weights are.
        of_keys = torch.zeros_like(keys, dtype=torch.promote_types(keys.dtype, torch.float32))
        for chunk in self.chunks:
            own = chunk.of(source).detach().requires_grad_()
            out = self._run(chunk, own, keys, is_output_read=False)
            of_own, more, *gradients = torch.autograd.grad(
                out, [own, keys, *trained], chunk.of(gradient), allow_unused=True
            )
            of_source[:, chunk.begin : chunk.end] = of_own
            of_keys += more
            take(gradients)
            del out, more, gradients  # before the next chunk's graph
        own = source.detach().requires_grad_()
        of_own, *gradients = torch.autograd.grad(
            self._keys_and_values(own), [own, *trained], self._own(of_keys.to(keys.dtype)), allow_unused=True
        )
        take(gradients)
        return of_source.add_(of_own)

    def _run(self, chunk: Chunk, hidden: Tensor, keys: Tensor, *, is_output_read: bool) -> Tensor:
        scope = replace(chunk.parts, keys_and_values=keys)
        return self.modules.block(hidden, self.layer, scope=scope, is_output_read=is_output_read)

    def _keys_and_values(self, source: Tensor) -> Tensor:
        """Return the keys and values of this rank's tokens, [B, L, 2 key heads, width]."""
        return self.modules.keys_and_values(source, self.layer, self.scope)

    def _whole(self, own: Tensor) -> Tensor:
        """Return keys and values of whole sequences. Collective over the context ranks."""
        return own if self.cut is None else self.context.gather(self.cut, own)

    def _own(self, whole: Tensor) -> Tensor:
        """Return the gradient of this rank's keys and values, summed over the context ranks. Collective over them."""
        return whole if self.cut is None else self.context.sum_of_own(self.cut.parts(whole))

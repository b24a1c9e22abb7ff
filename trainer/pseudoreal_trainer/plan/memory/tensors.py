"""Bytes of single tensors of a pass, by shape and type. Pure."""

from collections.abc import Callable
from dataclasses import dataclass

from pseudoreal_trainer.plan.sizes import Sizes
from pseudoreal_trainer.plan.units import Parameter

_EFFICIENT_BLOCK = 32
"""Tokens per block of torch's efficient attention (kAlignLSE)."""
_VARLEN_WIDTH_STEP, _VARLEN_MAX_WIDTH = 8, 256
"""Flash attention with variable lengths takes heads whose width is a multiple of the step and at most the maximum."""


@dataclass(frozen=True)
class Tensors:
    """Device bytes of each tensor of a pass over B sequences of T tokens. H: hidden features; F: MLP intermediates; Q:
    features of all queries; K: features of all keys; V: tokens of the vocabulary, or of this rank's slice of it.

    Three types: `compute`, for the passes; `accumulation`, for norms, routers and sums of attention, at least float32;
    and `master`, for the loss and for gradient accumulation.
    """

    sizes: Sizes
    tokens: int
    """Number of tokens, B * T."""
    layer: int = 0
    """Index of the layer; used only by tensors whose size depends on the layer."""

    @property
    def hidden(self) -> int:
        """[B, T, H], compute."""
        return self.sizes.boundary(self.tokens)

    @property
    def hidden_accumulation(self) -> int:
        """[B, T, H], accumulation."""
        return self.of(self.tokens * self.sizes.model.hidden_size, self.accumulation_bytes)

    @property
    def query(self) -> int:
        """[B, T, Q], compute."""
        return self.of(self.tokens * self.sizes.model.query_size, self.sizes.compute_bytes)

    @property
    def key(self) -> int:
        """[B, T, K], compute: the keys, or the values."""
        return self.of(self.tokens * self.sizes.model.key_size, self.sizes.compute_bytes)

    @property
    def normed_hidden(self) -> int:
        """[B, T, H], in a norm's type."""
        return self.normed(self.sizes.model.hidden_size)

    def normed(self, features: int) -> int:
        """Return the bytes of [B, T, features] in a norm's type."""
        return self.of(self.tokens * features, self.accumulation_bytes if self.norm_casts else self.sizes.compute_bytes)

    @property
    def intermediate(self) -> int:
        """[B, T, F], compute; for an expert, as if it received all tokens."""
        return self.of(self.tokens * self.intermediate_size, self.sizes.compute_bytes)

    @property
    def intermediate_size(self) -> int:
        """F, the number of MLP intermediates of a token, not a number of bytes."""
        model = self.sizes.model
        return (model.expert if model.has_experts(self.layer) else model.feed_forward).size

    @property
    def shared_intermediate(self) -> int:
        """[B, T, F of all shared experts], compute."""
        shared = self.sizes.model.shared_expert
        return self.of(self.tokens * shared.size, self.sizes.compute_bytes) if shared else 0

    @property
    def inverse_root(self) -> int:
        """[B, T, 1], accumulation: a norm's factor for each token."""
        return self.of(self.tokens, self.accumulation_bytes)

    @property
    def log_sum_exp(self) -> int:
        """[B, heads, T], accumulation: log-sum-exp of each token's scores. Torch's efficient attention pads T to whole
        blocks."""
        model, tokens = self.sizes.model, self.tokens
        if self.has_efficient_attention:
            tokens = tokens // model.sequence_length * _multiple(model.sequence_length, _EFFICIENT_BLOCK)
        return self.of(tokens * model.attention.heads, self.accumulation_bytes)

    @property
    def compute_logits(self) -> int:
        """[B * T, V], compute."""
        return self.of(self.tokens * self.sizes.vocabulary_rows, self.sizes.compute_bytes)

    @property
    def logits(self) -> int:
        """[B * T, V], master."""
        return self.of(self.tokens * self.sizes.vocabulary_rows, self.sizes.master_bytes)

    @property
    def norm_weight(self) -> int:
        """[H], compute."""
        return self.of(self.sizes.model.hidden_size, self.sizes.compute_bytes)

    @property
    def vocabulary(self) -> int:
        """[V, H], compute: the matrix of the embedding or of the head."""
        return self.of(self.sizes.vocabulary_rows * self.sizes.model.hidden_size, self.sizes.compute_bytes)

    def parameters(self, counts: Callable[[str], bool] = lambda name: True) -> int:  # noqa: ARG005
        """Return the bytes of the gradients of the layer's parameters whose names `counts` accepts, in the compute
        type."""
        return sum(self.of(p.numel, self.sizes.compute_bytes) for p in self._parameters if counts(p.name))

    @property
    def upcast_gradient(self) -> int:
        """Gradient of the layer's largest parameter, in the master type. The CPU casts the gradient before adding it. 0
        on a GPU, which casts while adding."""
        return self._upcast(max(parameter.numel for parameter in self._parameters))

    @property
    def _parameters(self) -> list[Parameter]:
        return [parameter for unit in self.sizes.units_of_layer(self.layer) for parameter in unit.parameters]

    @property
    def upcast_vocabulary_gradient(self) -> int:
        """[V, H], master, cast like `upcast_gradient`."""
        return self._upcast(self.sizes.vocabulary_rows * self.sizes.model.hidden_size)

    def _upcast(self, elements: int) -> int:
        return 0 if self.is_fused or not self.sizes.has_own_copies else elements * self.sizes.master_bytes

    @property
    def accumulation_bytes(self) -> int:
        return max(4, self.sizes.compute_bytes)

    @property
    def is_fused(self) -> bool:
        """True if a norm is one operation, as on a GPU; False if it is a chain of operations."""
        return self.sizes.device == "accelerator"

    @property
    def norm_casts(self) -> bool:
        """True if a norm copies its input into the norm's own type."""
        return not self.is_fused and self.accumulation_bytes != self.sizes.compute_bytes

    @property
    def has_varlen_attention(self) -> bool:
        """True if one call of attention computes all documents of a micro-batch: flash attention with variable lengths,
        with or without a window. Assumes a GPU with flash attention (`attention.varlen_obstacle` asks the GPU)."""
        width = self.sizes.model.head_size
        takes_heads = width % _VARLEN_WIDTH_STEP == 0 and width <= _VARLEN_MAX_WIDTH
        return self.is_fused and self.sizes.masks_documents and self.sizes.compute_bytes == 2 and takes_heads

    @property
    def has_efficient_attention(self) -> bool:
        """True if attention on a GPU uses torch's efficient kernel: over whole sequences, flash attention takes neither
        a mask nor float32."""
        takes_flash = self.sizes.compute_bytes == 2 and not self.sizes.is_masked(self.layer)
        return self.is_fused and not takes_flash and not self.has_varlen_attention

    def of(self, elements: int, width: int) -> int:
        return self.sizes.allocated(elements * width)


def _multiple(number: int, of: int) -> int:
    """Return `number` rounded up to a multiple of `of`."""
    return -(-number // of) * of

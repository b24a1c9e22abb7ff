"""Bytes of a pass: what autograd keeps, and the most that a backward pass needs at a time. Pure.

Derived from the operations of model/transformer.py on each device. Two of them differ: on the CPU a norm is a chain of
single operations, on a GPU it is one that keeps its input and the inverse root; and the CPU casts into memory of its
own where it adds tensors of two types. A GPU's attention is torch's flash kernel in bfloat16 and its efficient one in
float32; in float64 it has neither, and takes more than is said here.

Only tensors count. What kernels hold for themselves while they run depends on the processor: packed operands of a
matrix product, workspaces of cuBLAS, sums of an attention's backward pass. `measure-hardware` measures it.
"""

from dataclasses import dataclass
from functools import cached_property

from pseudoreal_trainer.forecast.memory.sizes import Sizes
from pseudoreal_trainer.plan.units import VOCABULARY

_INDEX_BYTES = 8
_EFFICIENT_BLOCK = 32
"""Tokens (kAlignLSE of torch's efficient attention)."""


@dataclass(frozen=True)
class Graphs:
    """Of passes over some tokens."""

    sizes: Sizes
    tokens: int

    @property
    def boundary(self) -> int:
        return self.sizes.boundary(self.tokens)

    @cached_property
    def block(self) -> int:
        """What autograd keeps of a block's forward pass besides its input, its output and its weights."""
        return self._block_without_ffn + (self._ffn if self.sizes.model.moe is None else self._mixture)

    @cached_property
    def block_backward(self) -> int:
        """Most bytes at a time besides the input and the gradient of the output; the forward pass is part of it.

        As the graph shrinks, the parameters' gradients grow. The most is reached at the start, with the whole graph;
        or where attention begins, with the feed-forward part's gradients; or at the end, with all gradients, or when
        those are added to the unit's, for which the CPU casts them one by one.
        """
        model, c = self.sizes.model, self.sizes.compute_bytes
        parameters, square = self._parameter_bytes(1), self._tensor(model.hidden**2, c)
        start = self.block + self._ffn_gradients + self._tensor(model.ffn.hidden * model.hidden, c)
        middle = self._block_without_ffn + parameters - 3 * square + (8 if self._norm_casts else 4) * self.boundary
        end = parameters + self._gradients_at_the_end * self.boundary
        return max(start, middle, end, parameters + 2 * self.boundary + self._cast(1))

    @cached_property
    def head_backward(self) -> int:
        """As of a block. The loss is at the end of it: log-probabilities, their gradient and that of the logits."""
        logits, features = self.tokens * VOCABULARY, self._features(self._norm_bytes)
        start = 3 * self._tensor(logits, self.sizes.master_bytes) + self._norm + self._norm_casts * features
        if self._is_fused:
            end = 2 * self.boundary + self._tensor(logits, self.sizes.compute_bytes)
        else:
            end = 5 * features + self._norm_casts * self.boundary
        return max(start, self._parameter_bytes(-1) + max(end, self.boundary + self._cast(-1)))

    @cached_property
    def embedding_backward(self) -> int:
        return self._parameter_bytes(0) + max(self.boundary, self._cast(0))

    @property
    def _block_without_ffn(self) -> int:
        """Where a norm is a chain and its type is its own, both norms keep their input; else the second one's input is
        the residual sum."""
        norm_inputs = 2 * self._features(self._norm_bytes) if self._norm_casts else self.boundary
        return norm_inputs + 2 * self._norm + self._attention

    @property
    def _attention(self) -> int:
        """Query, key, value, the mixed values, and those once more with the heads side by side; the log-sum-exp of
        each head. A GPU's efficient kernel mixes side by side, and has room for the sums of whole blocks of tokens."""
        model, tokens = self.sizes.model, self.tokens
        if not self._is_fused or self.sizes.compute_bytes == 2:
            return 5 * self.boundary + self._tensor(tokens * model.heads, self._norm_bytes)
        padded = tokens // model.sequence * _multiple(model.sequence, _EFFICIENT_BLOCK)
        return 4 * self.boundary + self._tensor(padded * model.heads, self._norm_bytes)

    @property
    def _norm(self) -> int:
        """The inverse root for each token, and what the norm makes; of a chain also the features before the weight."""
        chain = 0 if self._is_fused else self._features(self._norm_bytes)
        return self._tensor(self.tokens, self._norm_bytes) + chain + self.boundary

    @property
    def _norm_bytes(self) -> int:
        """Norms compute in float32 at least; attention keeps its log-sum-exp in that type too."""
        return max(4, self.sizes.compute_bytes)

    @property
    def _norm_casts(self) -> bool:
        return not self._is_fused and self._norm_bytes != self.sizes.compute_bytes

    @property
    def _is_fused(self) -> bool:
        """A norm is one operation."""
        return self.sizes.device == "cuda"

    @property
    def _gradients_at_the_end(self) -> int:
        """Tensors as large as the boundary in the backward pass of the first norm."""
        if self._is_fused:
            return 6
        return 14 if self._norm_casts else 7

    @property
    def _is_gated(self) -> bool:
        return self.sizes.model.ffn.activation == "swiglu"

    @property
    def _ffn_matrices(self) -> int:
        """[tokens, inner] that the feed-forward part keeps: up and its activation, and with gates two more."""
        return 4 if self._is_gated else 2

    @property
    def _ffn(self) -> int:
        return self._ffn_matrices * self._inner

    @property
    def _mixture(self) -> int:
        """Of each prototype the features before, behind and weighted behind its experts, gates, choices and order, and
        the probabilities; where the router casts, its weights, and its input instead of the norm's output."""
        moe, hidden, c, wide = self.sizes.model.moe, self.sizes.model.hidden, self.sizes.compute_bytes, self._norm_bytes
        assert moe is not None, "only a mixture has these"
        of_token = 3 * c * hidden + c + 2 * _INDEX_BYTES
        router = (wide != c) * hidden * (self.tokens * (wide - c) + moe.experts * wide)
        return moe.prototypes * (self._ffn + self.tokens * of_token) + self.tokens * moe.experts * wide + router

    @property
    def _ffn_gradients(self) -> int:
        """Of features, as the feed-forward part's backward pass starts; of experts, in the first one's."""
        moe, inner = self.sizes.model.moe, (2 if self._is_gated else 1) * self._inner
        if moe is None:
            return self.boundary + inner
        return 3 * self.boundary + inner * moe.prototypes // moe.experts

    @property
    def _inner(self) -> int:
        return self._tensor(self.tokens * self.sizes.model.ffn.hidden, self.sizes.compute_bytes)

    def _features(self, width: int) -> int:
        """[tokens, hidden] of a type of that many bytes."""
        return self._tensor(self.tokens * self.sizes.model.hidden, width)

    def _tensor(self, elements: int, width: int) -> int:
        return self.sizes.allocated(elements * width)

    def _parameter_bytes(self, unit: int) -> int:
        return sum(self._tensor(p.numel, self.sizes.compute_bytes) for p in self.sizes.units[unit].parameters)

    def _cast(self, unit: int) -> int:
        """The largest parameter's gradient in the master type, where that is another: a GPU casts as it adds."""
        if self._is_fused or not self.sizes.has_own_copies:
            return 0
        return self.sizes.master_bytes * max(parameter.numel for parameter in self.sizes.units[unit].parameters)


def _multiple(number: int, of: int) -> int:
    """The next one."""
    return -(-number // of) * of

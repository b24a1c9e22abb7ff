"""Bytes of a pass: what autograd keeps, and the most that a backward pass needs at a time. Pure.

Derived from model.py as it runs on the CPU, where a norm is a chain of single operations. A GPU's fused norm keeps
less, so there the figures are bounds.
"""

from dataclasses import dataclass

from pseudoreal_trainer.plan.sizes import Sizes
from pseudoreal_trainer.plan.units import VOCABULARY

_INDEX_BYTES = 8


@dataclass(frozen=True)
class Graphs:
    """Of passes over some tokens."""

    sizes: Sizes
    tokens: int

    @property
    def boundary(self) -> int:
        return self.sizes.boundary(self.tokens)

    @property
    def block(self) -> int:
        """What autograd keeps of a block's forward pass besides its input, its output and its weights."""
        return self._block_without_ffn + (self._ffn if self.sizes.model.moe is None else self._mixture)

    @property
    def block_backward(self) -> int:
        """Most bytes at a time besides the input and the gradient of the output; the forward pass is part of it.

        As the graph shrinks, the parameters' gradients grow. The most is reached at the start, with the whole graph;
        or where attention begins, with the feed-forward part's gradients; or at the end, with all gradients, or when
        those are added to the unit's, for which the CPU casts them one by one.
        """
        model, c = self.sizes.model, self.sizes.compute_bytes
        parameters, square = self._parameter_bytes(1), model.hidden**2 * c
        start = self.block + self._ffn_gradients + model.ffn.hidden * model.hidden * c
        middle = self._block_without_ffn + parameters - 3 * square + (8 if self._norm_casts else 4) * self.boundary
        end = parameters + (14 if self._norm_casts else 7) * self.boundary
        return max(start, middle, end, parameters + 2 * self.boundary + self._cast(1))

    @property
    def head_backward(self) -> int:
        """As of a block. The loss is at the end of it: log-probabilities, their gradient and that of the logits."""
        logits = self.tokens * VOCABULARY * self.sizes.master_bytes
        features = self.tokens * self.sizes.model.hidden * self._norm_bytes
        end = self._parameter_bytes(-1) + 5 * features + self._norm_casts * self.boundary
        start = 3 * logits + self._norm + self._norm_casts * features
        return max(start, end, self._parameter_bytes(-1) + self.boundary + self._cast(-1))

    @property
    def embedding_backward(self) -> int:
        return self._parameter_bytes(0) + max(self.boundary, self._cast(0))

    @property
    def _block_without_ffn(self) -> int:
        """Where a norm's type is its own, it keeps its input; else the second one's input is the residual sum."""
        model, c, norm = self.sizes.model, self.sizes.compute_bytes, self._norm_bytes
        norm_inputs = (2 if self._norm_casts else 1) * self.tokens * model.hidden * norm
        # Query, key, value, the mixed values, and those once more with the heads side by side.
        attention = self.tokens * (5 * c * model.hidden + norm * model.heads)
        return norm_inputs + 2 * self._norm + attention

    @property
    def _norm(self) -> int:
        """The inverse root for each token, and the normalized features before and after the weight."""
        hidden, norm = self.sizes.model.hidden, self._norm_bytes
        return self.tokens * (norm + (norm + self.sizes.compute_bytes) * hidden)

    @property
    def _norm_bytes(self) -> int:
        """Norms compute in float32 at least; attention keeps its log-sum-exp in that type too."""
        return max(4, self.sizes.compute_bytes)

    @property
    def _norm_casts(self) -> bool:
        return self._norm_bytes != self.sizes.compute_bytes

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
        router = self._norm_casts * hidden * (self.tokens * (wide - c) + moe.experts * wide)
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
        return self.tokens * self.sizes.model.ffn.hidden * self.sizes.compute_bytes

    def _parameter_bytes(self, unit: int) -> int:
        return self.sizes.units[unit].numel * self.sizes.compute_bytes

    def _cast(self, unit: int) -> int:
        """The largest parameter's gradient in the master type, where that is another."""
        largest = max(parameter.numel for parameter in self.sizes.units[unit].parameters)
        return largest * self.sizes.master_bytes if self.sizes.has_own_copies else 0

"""Bytes of a pass: what autograd keeps, and the most that a backward pass needs at a time. Pure.

Derived from the operations of model/transformer.py on each device, tensor by tensor. Two of them differ: on the CPU a
norm is a chain of single operations, on a GPU it is one that keeps its input and the inverse root; and the CPU casts
into memory of its own where it adds tensors of two types. A GPU's attention is torch's flash kernel in bfloat16 and its
efficient one in float32; in float64 it has neither, and takes more than is said here.

Only tensors count. What kernels hold for themselves while they run depends on the processor: packed operands of a
matrix product, workspaces of cuBLAS, sums of an attention's backward pass. `measure-hardware` measures it.
"""

from dataclasses import dataclass
from functools import cached_property

from pseudoreal_trainer.forecast.memory.sizes import Sizes
from pseudoreal_trainer.forecast.memory.tensors import Tensors

Table = dict[str, int]
"""Tensor, with its shape (and its type, where that is not the compute type) -> bytes. Letters and types as in
`Tensors`; N is B * T."""

_INDEX_BYTES = 8
_PROJECTIONS = tuple(f".attention.{name}." for name in ("query", "key", "value"))


@dataclass(frozen=True)
class Graphs:
    """Passes over some tokens."""

    sizes: Sizes
    tokens: int

    @property
    def boundary(self) -> int:
        return self._tensors.hidden

    @cached_property
    def block(self) -> int:
        """What autograd keeps of a block's forward pass besides its input, its output and its weights."""
        return _total(self._kept_until_attention, self._second_norm_input, self._norm, self._feed_forward)

    @cached_property
    def block_backward(self) -> int:
        """Most bytes at a time besides the input and the gradient of the output; the forward pass is part of it.

        As the graph shrinks, the parameters' gradients grow.
        """
        moments = [
            self._as_the_feed_forward_part_begins,
            self._at_the_second_norm,
            self._at_attention,
            self._at_the_last_projection,
            self._at_the_first_norm,
            self._as_gradients_are_added(1, {"output [B, T, H]": self.boundary}),
        ]
        return max(moments)

    @cached_property
    def head_backward(self) -> int:
        """Most bytes at a time of the final norm, the head and the loss behind it, counted as in `block_backward`."""
        t = self._tensors
        at_the_loss = {
            "log-probabilities [N, V], master": t.logits,
            "their gradient [N, V], master": t.logits,
            "gradient of the logits [N, V], master": t.logits,
            "input of the head [B, T, H]": t.hidden,
        }
        at_the_product = {
            "input of the head [B, T, H]": t.hidden,
            "gradient of the logits [N, V]": t.compute_logits,
            "gradient of the input of the head [B, T, H]": t.hidden,
            "gradient of the head [V, H]": t.parameters(-1, lambda name: name.startswith("head.")),
        }
        at_the_norm = {"gradients of all parameters": t.parameters(-1)}
        return max(
            _total(self._cast_input, self._norm, at_the_loss),
            _total(self._cast_input, self._norm, at_the_product),
            _total(self._cast_input, self._norm_backward, at_the_norm),
            self._as_gradients_are_added(-1, {}),
        )

    @cached_property
    def embedding_backward(self) -> int:
        t = self._tensors
        return t.parameters(0) + max(t.hidden, t.cast(0))

    @cached_property
    def _tensors(self) -> Tensors:
        return Tensors(self.sizes, self.tokens)

    # What autograd keeps. A norm's output is kept by what reads it.

    @property
    def _kept_until_attention(self) -> Table:
        return self._cast_input | self._norm | self._heads | self._side_by_side

    @property
    def _cast_input(self) -> Table:
        """The copy of its input that the first or the final norm makes; the input itself, which is that of the block or
        the head, is not counted."""
        return {"input of the norm [B, T, H], wide": self._tensors.wide_hidden} if self._tensors.norm_casts else {}

    @property
    def _second_norm_input(self) -> Table:
        t = self._tensors
        return {"sum of input and attention [B, T, H], of the norm's type": t.wide_hidden if t.norm_casts else t.hidden}

    @property
    def _norm(self) -> Table:
        t = self._tensors
        kept = {"inverse root of the mean square [B, T, 1], wide": t.inverse_root}
        return kept if t.is_fused else kept | {"features before the weight [B, T, H], wide": t.wide_hidden}

    @property
    def _heads(self) -> Table:
        t = self._tensors
        return {
            "input of attention [B, T, H]": t.hidden,
            "query, rotated [B, heads, T, H / heads]": t.hidden,
            "key, rotated [B, heads, T, H / heads]": t.hidden,
            "value [B, heads, T, H / heads]": t.hidden,
            "mixed values [B, heads, T, H / heads]": t.hidden,
            "log-sum-exp of the scores [B, heads, T], wide": t.log_sum_exp,
        }

    @property
    def _side_by_side(self) -> Table:
        t = self._tensors
        return {} if t.has_efficient_attention else {"mixed values, heads side by side [B, T, H]": t.hidden}

    @property
    def _feed_forward(self) -> Table:
        if self.sizes.model.experts is not None:
            return self._mixture
        return {"input of the feed-forward part [B, T, H]": self._tensors.hidden} | self._inner

    @property
    def _inner(self) -> Table:
        inner = self._tensors.inner
        if self._is_gated:
            return {
                "gate [B, T, F]": inner,
                "its activation [B, T, F]": inner,
                "up [B, T, F]": inner,
                "product of the last two [B, T, F]": inner,
            }
        return {"up [B, T, F]": inner, "its activation [B, T, F]": inner}

    @property
    def _mixture(self) -> Table:
        """Each prototype has all N tokens once, and so as much of `_inner` as a block without experts. As if no expert
        were ever full."""
        t, model, experts = self._tensors, self.sizes.model, self.sizes.model.experts
        assert experts is not None, "only a mixture has these"
        wide, compute, casts = t.wide_bytes, self.sizes.compute_bytes, t.wide_bytes != self.sizes.compute_bytes
        of_prototype = {
            "tokens in the order of the experts [N, H]": t.hidden,
            "outputs of the experts [N, H]": t.hidden,
            "outputs times gates [N, H]": t.hidden,
            "gates [N]": t.of(self.tokens, compute),
            "choices [N], indices": t.of(self.tokens, _INDEX_BYTES),
            "order [N], indices": t.of(self.tokens, _INDEX_BYTES),
        }
        return {
            "input of the router [B, T, H], wide": t.wide_hidden,
            "router [experts, H], wide": t.of(experts.count * model.hidden_size, wide) if casts else 0,
            "probabilities [B, T, experts], wide": t.of(self.tokens * experts.count, wide),
        } | {name: experts.prototypes * size for name, size in (of_prototype | self._inner).items()}

    # What lives at those moments of a block's backward pass that may need the most.

    @property
    def _as_the_feed_forward_part_begins(self) -> int:
        t, model = self._tensors, self.sizes.model
        down = t.of(model.feed_forward.size * model.hidden_size, self.sizes.compute_bytes)
        table = {"output [B, T, H]": t.hidden, "gradient of the matrix down [H, F]": down}
        return self.block + _total(table, self._first_gradients)

    @property
    def _first_gradients(self) -> Table:
        """Gradients of features, as the feed-forward part's backward pass starts; of experts, in the first one's."""
        t, experts = self._tensors, self.sizes.model.experts
        # With gates the gradient of the product has taken the place of the product, which is counted as kept.
        names = ["gate's activation", "up"] if self._is_gated else ["activation"]
        inner = {f"gradient of the {name} [B, T, F]": t.inner for name in names}
        if experts is None:
            return inner
        return {name: size * experts.prototypes // experts.count for name, size in inner.items()} | {
            "gradient of the outputs times gates [N, H]": t.hidden,
            "gradient of the outputs of the experts [N, H]": t.hidden,
        }

    @property
    def _at_the_second_norm(self) -> int:
        later = self._tensors.parameters(1, lambda name: ".attention" not in name)
        table = {"output [B, T, H]": self.boundary, "gradients of the parameters behind attention": later}
        return _total(self._kept_until_attention, self._second_norm_input, self._norm_backward, table)

    @property
    def _at_attention(self) -> int:
        t = self._tensors
        first = (*_PROJECTIONS, ".attention_norm.")
        table = {
            "output [B, T, H]": t.hidden,
            "gradient of the sum of input and attention [B, T, H]": t.hidden,
            "gradient of the mixed values [B, T, H]": t.hidden,
            "gradient of the query [B, heads, T, H / heads]": t.hidden,
            "gradient of the key [B, heads, T, H / heads]": t.hidden,
            "gradient of the value [B, heads, T, H / heads]": t.hidden,
            "gradients of other parameters": t.parameters(1, lambda name: not any(part in name for part in first)),
        }
        return _total(self._cast_input, self._norm, self._heads, table)

    @property
    def _at_the_last_projection(self) -> int:
        t = self._tensors
        table = {
            "input of attention [B, T, H]": t.hidden,
            "output [B, T, H]": t.hidden,
            "gradient of the sum of input and attention [B, T, H]": t.hidden,
            "gradient of the input of attention by value and key [B, T, H]": t.hidden,
            "gradient of the query, heads side by side [B, T, H]": t.hidden,
            "gradient of the input of attention by the query [B, T, H]": t.hidden,
            "gradients of parameters": t.parameters(1, lambda name: ".attention_norm." not in name),
        }
        return _total(self._cast_input, self._norm, table)

    @property
    def _at_the_first_norm(self) -> int:
        t = self._tensors
        table = {"output [B, T, H]": t.hidden, "gradients of all parameters": t.parameters(1)}
        if t.is_fused or t.norm_casts:
            # Else the norm's own is added to it at once.
            table["gradient of the sum of input and attention [B, T, H]"] = t.hidden
        return _total(self._cast_input, self._norm_backward, table)

    @property
    def _norm_backward(self) -> Table:
        """Gradients of a norm's features, [B, T, H] each. The norm keeps nothing but its input any more."""
        t = self._tensors
        if t.is_fused:
            return {"gradient of the output": t.hidden, "gradient of the input": t.hidden}
        return {
            "gradient of the input by the product, wide": t.wide_hidden,
            "gradient of the squares, wide": t.wide_hidden,
            "input to the power of one, wide": t.wide_hidden,
            "derivative of the squares, wide": t.wide_hidden,
            "gradient of the input by the squares, wide": t.wide_hidden,
        }

    def _as_gradients_are_added(self, unit: int, left: Table) -> int:
        """At the end, as the parameters' gradients are added to the unit's."""
        t = self._tensors
        table = {
            "gradient of the input [B, T, H]": t.hidden,
            "gradients of all parameters": t.parameters(unit),
            "the largest of them, master": t.cast(unit),
        }
        return _total(left, table)

    @property
    def _is_gated(self) -> bool:
        return self.sizes.model.feed_forward.activation == "SwiGLU"


def _total(*tables: Table) -> int:
    return sum(sum(table.values()) for table in tables)

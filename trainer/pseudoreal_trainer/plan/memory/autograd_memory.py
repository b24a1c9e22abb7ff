"""Bytes of a pass: tensors saved for backward, and the peak of a backward pass. Pure.

Derived from the operations of the modules in model/ on each device, tensor by tensor. Devices differ in two operations.
A norm is a chain of single operations on the CPU; on a GPU it is one operation that saves its input and the inverse
root. And the CPU casts into separate memory when it adds tensors of two types. Attention on a GPU is torch's flash
kernel in bfloat16 and its efficient kernel in float32. In float64 neither kernel exists, and attention takes more
memory than is counted here.

Only tensors count. Bytes that kernels allocate for themselves while they run depend on the processor: packed operands
of a matrix product, workspaces of cuBLAS, sums of an attention's backward pass. `measure-hardware` measures these
bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from pseudoreal_api.spec.optimizer import PRODUCT_BLOCK

from pseudoreal_trainer.plan.memory.saved_tensors import SavedTensors, Table, total
from pseudoreal_trainer.plan.memory.tensors import Tensors
from pseudoreal_trainer.plan.sizes import Sizes, loss_chunk_length

_PROJECTIONS = tuple(f".attention.{name}." for name in ("query", "key", "value"))
_FIRST_NORMS = (".attention_norm.", ".attention.query_norm.", ".attention.key_norm.")


@dataclass(frozen=True)
class AutogradMemory(SavedTensors):
    """Bytes of passes over `tokens` tokens: saved for backward, and peaks."""

    max_chunk_tokens: int | None = None
    """Maximum number of tokens of a chunk of the loss; None: the loss has one chunk."""

    @property
    def boundary(self) -> int:
        return self._tensors.hidden

    @cached_property
    def block_backward(self) -> int:
        """Peak bytes of a block's backward pass, including its forward pass, without the block's input and the gradient
        of its output.

        While the graph shrinks, the gradients of the parameters grow.
        """
        moments = [
            self._at_mlp_post_norm,
            self._at_mlp_start,
            self._at_middle_norm,
            self._at_attention,
            self._at_query_norm,
            self._at_query_projection,
            self._at_attention_pre_norm,
            self._at_gradient_accumulation,
        ]
        return max(moments) + self._rounded_operands + self._exchanged_with_tensor_ranks

    @property
    def _exchanged_with_tensor_ranks(self) -> int:
        """Upper bound of the bytes that a backward pass of sliced parts has besides the tensors of this rank's tokens
        with whole matrices: the gathered inputs; and at a time five tensors of all tensor ranks' tokens, as a
        gradient is gathered, or summed and cut into the parts that are sent and received."""
        if self.tensor_ranks == 1:
            return 0
        return self._tokens_of_all_tensor_ranks + 5 * self.tensor_ranks * self._tensors.hidden

    @property
    def keys_backward(self) -> int:
        """Peak bytes of the way back through keys and values of all tokens, after the chunks."""
        t, own = self._tensors, (".attention.key", ".attention.value", ".attention_norm.")
        by_value = {"gradient of the input by the value [B, T, H]": t.hidden}
        by_key = {"gradient of the input by the key [B, T, H]": t.hidden}
        saved = total(self._pre_norm, self._attention_input, self._document_rotation)
        moments = [saved + total(self._head_norm("key"), by_value, by_key)]
        if self._head_norm("key"):
            wide = t.of(self.tokens * self.sizes.model.key_size, t.accumulation_bytes)
            moments.append(saved + total(by_value, self._norm_backward_of(t.key, wide)))
        if self._has_pre_norm:
            moments.append(total(self._upcast_norm_input, self._norm_backward))
        of_parameters = t.parameters(lambda name: any(part in name for part in own))
        return max(moments) + of_parameters + self._rounded_operands_of([self.sizes.model.key_size])

    @property
    def beside_chunks(self) -> int:
        """Bytes beside the graph of a chunk, while the backward pass of a layer goes through chunks of the sequence:
        the gradient of the input, and keys and values of whole sequences with their gradients. An upper bound: the
        chunk's own gradients are counted three times, as a part of them is summed."""
        keys = 2 * self.context_ranks * self._tensors.key
        wide = keys * self._tensors.accumulation_bytes // self.sizes.compute_bytes
        return self.boundary + 4 * keys + wide

    @cached_property
    def backward_up_to_experts(self) -> int:
        """Peak bytes of the backward pass up to expert-parallel experts, without the experts."""
        moments = [
            self.saved_up_to_experts + self._recomputed_of_shared_experts + self.boundary,
            self._at_attention,
            self._at_query_norm,
            self._at_query_projection,
            self._at_attention_pre_norm,
        ]
        return max(moments) + self._rounded_operands + self._exchanged_with_tensor_ranks

    @property
    def _rounded_operands(self) -> int:
        model = self.sizes.model
        dense = model.shared_expert if self._is_mixture else model.feed_forward
        return self._rounded_operands_of([model.query_size, *([dense.size] if dense is not None else [])])

    def _rounded_operands_of(self, outputs: Sequence[int]) -> int:
        """Return an upper bound of the bytes of the operands of a product while they are rounded to float8: both
        operands of the largest product between the hidden size and one of `outputs`, and as much again while they are
        scaled. In MXFP8, rows are first filled up to whole blocks, and one more copy may have the blocks of a
        transposed matrix."""
        if self.sizes.products == "Compute":
            return 0
        model = self.sizes.model
        block, copies = (PRODUCT_BLOCK, 3) if self.sizes.products == "MXFP8" else (1, 2)
        hidden, *sizes = (-(-size // block) * block for size in (model.hidden_size, *outputs))
        return max(
            copies * self._tensors.of(self.tokens * max(hidden, size) + hidden * size, self.sizes.compute_bytes)
            for size in sizes
        )

    @cached_property
    def expert_first_gradients(self) -> int:
        """Bytes of the gradients of the experts' MLP intermediates, for one row per token."""
        names = 2 if self._is_gated else 1
        return names * self._tensors.intermediate

    @cached_property
    def head_backward(self) -> int:
        """Peak bytes of the final norm, the head and the loss after it, counted as in `block_backward`."""
        t, chunk = self._tensors, self._chunk_tensors
        features = {"input of the head [B, T, H], whose place its gradient takes": t.hidden}
        made = {"gradient of the chunk [c, H]": chunk.hidden, "gradient of the head [V, H]": t.vocabulary}
        at_the_product = made | {"gradient of the logits [c, V]": chunk.compute_logits}
        as_it_is_added = made | {"gradient of the head [V, H], master": t.upcast_vocabulary_gradient}
        # On a GPU, the gradient of the features is counted as the gradient of the norm's output.
        at_the_norm = {"gradient of the norm's weight [H]": t.norm_weight} | ({} if t.is_fused else features)
        gathered = {"features of all tensor ranks' tokens, whose place their gradient takes": self._of_tensor_ranks(1)}
        # As the features are gathered and put in order, and as their gradients are cut, sent, received and added up.
        exchanged = {"features of all tensor ranks' tokens, in an exchange": self._of_tensor_ranks(4)}
        return max(
            total(self._upcast_norm_input, self._norm, features, gathered, self._logits),
            total(self._upcast_norm_input, self._norm, features, gathered, at_the_product),
            total(self._upcast_norm_input, self._norm, features, gathered, as_it_is_added),
            total(self._upcast_norm_input, self._norm, features, exchanged),
            total(self._upcast_norm_input, self._norm_backward, at_the_norm),
        )

    def _of_tensor_ranks(self, tensors: int) -> int:
        """Return the bytes of so many tensors [B, T, H] with the tokens of all tensor ranks; 0 if this rank has the
        whole vocabulary."""
        return tensors * self.tensor_ranks * self._tensors.hidden if self._has_slice_of_vocabulary else 0

    @property
    def _has_slice_of_vocabulary(self) -> bool:
        return self.sizes.vocabulary_rows < self.sizes.model.vocabulary_size

    @property
    def _logits(self) -> Table:
        """Tensors with one value per token of the vocabulary that are in memory at the peak, [c, V] each, in the master
        type."""
        logits = self._chunk_tensors.logits
        names = ["log-probabilities", "their gradient", "gradient of the logits"]
        if self.sizes.has_z_loss:
            # The z-loss comes last in the forward pass, so its backward pass runs first. Until then the
            # log-probabilities stay in memory.
            names = ["log-probabilities", "logits", "logits less their log-sum-exp", "probabilities", "gradient"]
        if self.sizes.model.logit_soft_cap is not None:
            names.append("hyperbolic tangents")
        return {f"{name} [c, V], master": logits for name in names}

    @cached_property
    def embedding_backward(self) -> int:
        t = self._tensors
        return t.vocabulary + max(t.hidden + self._of_tensor_ranks(4), t.upcast_vocabulary_gradient)

    @cached_property
    def _chunk_tensors(self) -> Tensors:
        """Tensors of a chunk of the loss, which has c tokens."""
        tokens = self.tokens * (self.tensor_ranks if self._has_slice_of_vocabulary else 1)
        return Tensors(self.sizes, loss_chunk_length(tokens, self.max_chunk_tokens))

    # Bytes alive at the possible peaks of a block's backward pass.

    @property
    def _at_mlp_post_norm(self) -> int:
        """Bytes at the MLP's post-norm."""
        if not self._has_post_norm:
            return 0
        return self.block - total(self._norm) + total(self._norm_backward, {"output [B, T, H]": self.boundary})

    @property
    def _at_mlp_start(self) -> int:
        t = self._tensors
        table = {"output [B, T, H]": t.hidden}
        if self._has_post_norm:
            table["gradient of the output before the norm [B, T, H]"] = t.hidden
        if self._is_mixture:
            first = max(self._at_output_sum, self._at_shared_experts, self._at_experts)
        else:
            first = total(self._first_gradients(t.intermediate), self._recomputed_intermediates)
            first += self._gradients_of(".ffn.down.")
        return self.block - total(self._post_norm) + total(table) + first

    # Possible peaks of a mixture's backward pass: temporary bytes, in addition to the saved tensors.

    @property
    def _at_output_sum(self) -> int:
        """Temporary bytes at the sum over the experts' outputs, each multiplied by its gate."""
        return 2 * self.sizes.choices * self._tensors.hidden

    @property
    def _at_shared_experts(self) -> int:
        """Temporary bytes at the shared experts. They run before the other experts in the backward pass."""
        first = total(self._first_gradients(self._tensors.shared_intermediate)) + self._gradients_of(".shared.down.")
        return first + self._recomputed_of_shared_experts

    @property
    def _recomputed_of_shared_experts(self) -> int:
        return total(self._recomputed_intermediates_of(self._tensors.shared_intermediate))

    @property
    def _at_experts(self) -> int:
        """Temporary bytes at the experts, without the tensors saved by the sum and by shared experts, which are free by
        then."""
        t = self._tensors
        of_choice = self._first_gradients(t.intermediate) | {"gradient of the output [N, H]": t.hidden}
        made = self.sizes.choices * total(of_choice, self._recomputed_intermediates)
        made += self._gradients_of(".experts.down.")
        if self.sizes.model.shared_expert is not None:
            made += self._gradients_of(".shared.") + t.hidden
        return made - total(self._expert_outputs, self._shared_experts)

    def _gradients_of(self, part: str) -> int:
        """Return the bytes of the gradients of the layer's parameters with `part` in their names."""
        return self._tensors.parameters(lambda name: part in name)

    def _first_gradients(self, intermediate: int) -> Table:
        """Return the gradients of the MLP intermediates at the start of an MLP's backward pass. `intermediate`: bytes
        of [B, T, F]. With gates, the gradient of the product has replaced the product, which is counted as saved."""
        names = ["gate's activation", "up"] if self._is_gated else ["activation"]
        return {f"gradient of the {name} [B, T, F]": intermediate for name in names}

    @property
    def _at_middle_norm(self) -> int:
        """Bytes at the MLP's pre-norm, or at the post-norm of attention."""
        t = self._tensors
        later = t.parameters(lambda name: ".attention." not in name and ".attention_norm." not in name)
        table = {"output [B, T, H]": self.boundary, "gradients of the parameters after attention": later}
        if self._has_post_norm:
            table["gradient of the sum of input and attention [B, T, H]"] = t.hidden
        saved = self._saved_between if self._has_post_norm else {"of the norm's input": t.normed_hidden}
        return total(self._saved_until_attention, saved, self._norm_backward, table)

    @property
    def _at_attention(self) -> int:
        t = self._tensors
        first = (*_PROJECTIONS, *_FIRST_NORMS)
        table = {
            "output [B, T, H]": t.hidden,
            "gradient of the sum of input and attention [B, T, H]": t.hidden,
            "gradient of the mixed values [B, T, Q]": t.query,
            "gradient of the query [B, T, heads, Q / heads]": t.query,
            **self._gradients_of_keys_and_values,
            "gradients of other parameters": t.parameters(lambda name: not any(part in name for part in first)),
        }
        return total(self._pre_norm, self._kept_attention_input, self._heads, table)

    @property
    def _gradients_of_keys_and_values(self) -> Table:
        key = self._key
        if self.chunk is not None:
            return {}  # counted beside the chunks
        if self.context_ranks > 1:
            names = ("as one chunk adds to them", "sum over the chunks", "on their way to the ranks")
            whole = 2 * self.context_ranks * key
            return {f"gradients of the keys and values of whole sequences, {name}": whole for name in names}
        return {
            "gradient of the key [B, T, key heads, K / key heads]": key,
            "gradient of the value [B, T, key heads, K / key heads]": key,
        }

    @property
    def _at_query_norm(self) -> int:
        """Bytes at the norm of the queries, which the backward pass reaches after the norm of the keys."""
        t, saved = self._tensors, self._head_norm("query")
        if not saved:
            return 0
        first = (".attention.query.", ".attention.query_norm.", ".attention_norm.")
        table = {
            "output [B, T, H]": t.hidden,
            "gradient of the sum of input and attention [B, T, H]": t.hidden,
            "gradient of the input of attention by value and key [B, T, H]": t.hidden,
            "gradients of other parameters": t.parameters(lambda name: not any(part in name for part in first)),
        }
        at_norm = self._norm_backward_of(t.query, t.of(self.tokens * self.sizes.model.query_size, t.accumulation_bytes))
        return total(self._pre_norm, self._attention_input, table, at_norm)

    @property
    def _at_query_projection(self) -> int:
        t = self._tensors
        table = {
            "output [B, T, H]": t.hidden,
            "gradient of the sum of input and attention [B, T, H]": t.hidden,
            "gradient of the input of attention by value and key [B, T, H]": t.hidden,
            "gradient of the query, heads side by side [B, T, Q]": t.query,
            "gradient of the input of attention by the query [B, T, H]": t.hidden,
            "gradients of parameters": t.parameters(lambda name: ".attention_norm." not in name),
        }
        return total(self._pre_norm, self._attention_input, table)

    @property
    def _at_attention_pre_norm(self) -> int:
        if not self._has_pre_norm:
            return 0
        t = self._tensors
        table = {"output [B, T, H]": t.hidden, "gradients of all parameters": t.parameters()}
        if t.is_fused or t.norm_casts:
            # Otherwise the gradient of the norm is added to this gradient in place.
            table["gradient of the sum of input and attention [B, T, H]"] = t.hidden
        return total(self._upcast_norm_input, self._norm_backward, table)

    @property
    def _norm_backward(self) -> Table:
        """Gradients of a norm's features, [B, T, H] each. Of the tensors saved for backward, only the norm's input is
        still in memory."""
        return self._norm_backward_of(self._tensors.hidden, self._tensors.hidden_accumulation)

    def _norm_backward_of(self, features: int, wide: int) -> Table:
        """Return the gradients of a norm's features. `features`, `wide`: bytes of the features in the compute type and
        in the accumulation type."""
        if self._tensors.is_fused:
            return {"gradient of the output": features, "gradient of the input": features}
        return {
            "gradient of the input by the product, accumulation": wide,
            "gradient of the squares, accumulation": wide,
            "input to the power of one, accumulation": wide,
            "derivative of the squares, accumulation": wide,
            "gradient of the input by the squares, accumulation": wide,
        }

    @property
    def _at_gradient_accumulation(self) -> int:
        """Bytes at the end, when the parameters' gradients are added to the unit's gradient."""
        t = self._tensors
        table = {
            "output [B, T, H]": t.hidden,
            "gradient of the input [B, T, H]": t.hidden,
            "gradients of all parameters": t.parameters(),
            "the largest of them, master": t.upcast_gradient,
        }
        return total(table)


def autograd_memory_by_position(
    sizes: Sizes,
    tokens: int,
    max_chunk_tokens: int | None = None,
    *,
    is_selective: bool = False,
    context_ranks: int = 1,
    tensor_ranks: int = 1,
    chunk: int | None = None,
) -> list[AutogradMemory]:
    """Return the memory of the passes of each position over `tokens` tokens. `max_chunk_tokens`: maximum number of
    tokens of a chunk of the loss; None: the loss has one chunk. `is_selective`: whether backward passes
    recompute the outputs of norms and of activation functions. `context_ranks`: number of ranks over which each
    sequence is cut. `tensor_ranks`: number of ranks with slices of the same matrices. `chunk`: as in `SavedTensors`."""
    kinds: dict[tuple[bool, bool], AutogradMemory] = {}
    layers = [
        kinds.setdefault(
            sizes.kind(layer),
            AutogradMemory(sizes, tokens, layer, is_selective, context_ranks, tensor_ranks, chunk, max_chunk_tokens),
        )
        for layer in range(sizes.model.layers)
    ]
    return [layers[0], *layers, layers[-1]]

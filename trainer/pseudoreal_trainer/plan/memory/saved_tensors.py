"""Device bytes of the tensors that autograd saves in a block's forward pass, tensor by tensor. Pure.

A norm's output is counted under its reader (a projection, the router), not under the norm. A block's input, output and
weights are not counted here.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from pseudoreal_api.spec.model import TopK

from pseudoreal_trainer.plan.memory.tensors import Tensors
from pseudoreal_trainer.plan.sizes import Sizes

Table = dict[str, int]
"""Tensor, with its shape (and its type, unless it is the compute type) -> bytes. Letters and types as in `Tensors`; N
is B * T."""

_INDEX_BYTES = 8


@dataclass(frozen=True)
class SavedTensors:
    """Bytes of the tensors that passes of a block over `tokens` tokens save for backward."""

    sizes: Sizes
    tokens: int
    layer: int = 0
    """Number of the layer that uses the block."""
    is_selective: bool = False
    """Whether the backward pass recomputes the tensors that the modules mark (`model.recomputation`)."""
    context_ranks: int = 1
    """Number of context ranks; 1: no context parallelism."""
    tensor_ranks: int = 1
    """Number of tensor ranks; 1: no tensor parallelism."""
    chunk: int | None = None
    """Number of tokens of each sequence in a pass over a chunk of the sequence; None: a pass over all of this rank's
    tokens."""

    @cached_property
    def block(self) -> int:
        """Bytes saved for backward by a block's forward pass, without its input, its output and its weights."""
        own = total(self._saved_until_attention, self._saved_between, self._feed_forward, self._post_norm)
        return own + self._tokens_of_all_tensor_ranks

    @cached_property
    def saved_up_to_experts(self) -> int:
        """Bytes saved for backward up to expert-parallel experts."""
        own = total(self._saved_until_attention, self._saved_between, self._router, self._shared_experts)
        return own + self._tokens_of_all_tensor_ranks

    @property
    def _tokens_of_all_tensor_ranks(self) -> int:
        """Bytes of the inputs of attention and of the MLP for the tokens of all tensor ranks, gathered before sliced
        matrices. All other tensors of these parts have as many elements as those of this rank's tokens for whole
        matrices: more tokens, and as many times fewer features."""
        if self.tensor_ranks == 1:
            return 0
        return self.sizes.sliced_parts(self.layer) * self.tensor_ranks * self._tensors.hidden

    @cached_property
    def expert_intermediates(self) -> int:
        """Bytes of the experts' MLP intermediates that are saved for N rows, one row per token.

        Multiply by the number of experts per token. `ExpertParallelBytes` counts the input and output rows.
        """
        return total(self._mlp_intermediates)

    @cached_property
    def recomputed_expert_intermediates(self) -> int:
        """Bytes of the experts' MLP intermediates that are recomputed, counted like `expert_intermediates`."""
        return total(self._recomputed_intermediates)

    @cached_property
    def routing(self) -> int:
        """Bytes of a routing decision, saved so that the recomputed pass routes identically.

        Expert index and row order (int64 per choice); refusals (1 byte per choice, prototypes only); tokens per expert,
        twice if a balance loss also needs the counts without the balancing bias.
        """
        sizes, top_k = self.sizes, self.sizes.model.top_k
        rows = sizes.choices * self.tokens
        has_unbiased = top_k is not None and top_k.balance_over == "Step" and top_k.bias_update_rate is not None
        refusals = 0 if top_k else sizes.allocated(rows)
        return 2 * sizes.allocated(_INDEX_BYTES * rows) + refusals + (2 if has_unbiased else 1) * self.counts

    @property
    def counts(self) -> int:
        """Bytes of the counts of tokens per expert, [experts]."""
        return self.sizes.allocated(_INDEX_BYTES * self.sizes.experts)

    @cached_property
    def _tensors(self) -> Tensors:
        return Tensors(self.sizes, self.tokens, self.layer)

    @property
    def _saved_until_attention(self) -> Table:
        return self._pre_norm | self._kept_attention_input | self._heads | self._joined_spans

    @property
    def _saved_between(self) -> Table:
        """Tensors saved after attention and before the MLP."""
        t = self._tensors
        before = {"sum of input and attention [B, T, H]": t.hidden}
        if self._has_pre_norm:
            before = {"sum of input and attention [B, T, H], of the norm's type": t.normed_hidden} | self._norm
            # A router keeps its own copy of the norm's output; the MLP and shared experts need the norm again.
            is_normed_again = not self._is_mixture or self.sizes.model.shared_expert is not None
            if self.is_selective and t.norm_casts and is_normed_again:
                before["sum of input and attention [B, T, H]"] = t.hidden
        return before | {f"{name}, of attention": size for name, size in self._post_norm.items()}

    @property
    def _pre_norm(self) -> Table:
        return self._upcast_norm_input | self._norm if self._has_pre_norm else {}

    @property
    def _post_norm(self) -> Table:
        """Tensors saved by a post-norm."""
        if not self._has_post_norm:
            return {}
        saved = {f"{name}, of the post-norm": size for name, size in self._norm.items()}
        return saved | {"output before the norm [B, T, H], of the norm's type": self._tensors.normed_hidden}

    @property
    def _upcast_norm_input(self) -> Table:
        """Copy of the input of the first or the final norm in the accumulation type. Made on the CPU in bfloat16 only.
        The input itself is counted with the block or the head."""
        t = self._tensors
        return {"input of the norm [B, T, H], accumulation": t.hidden_accumulation} if t.norm_casts else {}

    @property
    def _attention_input(self) -> Table:
        """Output of the pre-norm. Empty without a pre-norm, because attention then reads the block's input."""
        return {"input of attention [B, T, H]": self._tensors.hidden} if self._has_pre_norm else {}

    @property
    def _kept_attention_input(self) -> Table:
        return {} if self.is_selective else self._attention_input

    @property
    def _norm(self) -> Table:
        t = self._tensors
        saved = {"inverse root of the mean square [B, T, 1], accumulation": t.inverse_root}
        if not t.is_fused:
            saved["features before the weight [B, T, H], accumulation"] = t.hidden_accumulation
        return saved

    @property
    def _heads(self) -> Table:
        t = self._tensors
        return (
            self._query_and_key_norms
            | self._document_rotation
            | {
                "query, rotated [B, T, heads, Q / heads]": t.query,
                **self._keys_and_values,
                "mixed values [B, T, heads, Q / heads]": t.query,
                "log-sum-exp of the scores [B, heads, T], accumulation": t.log_sum_exp,
            }
        )

    @property
    def _keys_and_values(self) -> Table:
        """Keys and values saved by attention; with context parallelism, of whole sequences, gathered into one
        tensor."""
        if self.chunk is not None:
            return self._masks  # keys and values of whole sequences are counted beside the chunks
        if self.context_ranks > 1:
            whole = 2 * self.context_ranks * self._key
            return {"keys and values of whole sequences [B, T, 2 K]": whole} | self._masks
        return dict.fromkeys(
            ("key, rotated [B, T, key heads, K / key heads]", "value [B, T, key heads, K / key heads]"), self._key
        )

    @property
    def _key(self) -> int:
        """Bytes of the keys of this rank's heads, for the tokens of all tensor ranks."""
        return self._tensors.key * self._key_features // self.sizes.model.key_size

    @property
    def _key_features(self) -> int:
        """Number of features of the keys for each of this rank's tokens. If several tensor ranks use the same key head,
        each computes this head for the tokens of all of them."""
        model = self.sizes.model
        return max(model.key_size, self.tensor_ranks * model.head_size)

    @property
    def _masks(self) -> Table:
        """Masks of a rank's two chunks, or of a chunk of the sequence, saved by attention on the CPU, and with a
        sliding window on a GPU. An upper bound: without documents, the queries of a rank's two chunks together attend
        to 2 C + 1 chunks of keys, and some rank needs no mask for its first chunk; the last chunk of the sequence
        attends to all keys in its window. With documents, each sequence has masks of its own, for fewer keys."""
        length, window = self.sizes.model.sequence_length, self.sizes.model.window_of(self.layer)
        if self._tensors.is_fused and (window is None or window >= length):
            return {}
        if self.chunk is not None:
            pairs = self.chunk * (length if window is None else min(length, self.chunk + window))
            masks = self.tokens // self.chunk if self.sizes.masks_documents else 1
            return {"mask of a chunk [c, keys]": masks * self._tensors.of(pairs, self.sizes.compute_bytes)}
        chunk = length // (2 * self.context_ranks)
        keys = (2 * self.context_ranks + 1) * chunk
        pairs = chunk * (keys if window is None else min(keys, 2 * (chunk + window)))
        sequences = self.tokens * self.tensor_ranks * self.context_ranks // length
        masks = sequences if self.sizes.masks_documents else 1
        return {"masks of two chunks [T / 2 C, keys]": masks * self._tensors.of(pairs, self.sizes.compute_bytes)}

    @property
    def _document_rotation(self) -> Table:
        """Cosines and sines at the positions of the tokens, copied from the resident rotary tables if documents are
        masked, and for passes over parts of sequences. With masked documents, each sequence has its own positions;
        without, all sequences share one copy. Otherwise empty: passes over whole sequences read the resident tables."""
        if not (self.sizes.masks_documents or self._has_parts):
            return {}
        of_sequence = self.chunk or self.sizes.model.sequence_length // self.context_ranks
        tokens = self.tokens * self.tensor_ranks if self.sizes.masks_documents else of_sequence
        part = self._tensors.of(tokens * self.sizes.model.head_size // 2, self.sizes.compute_bytes)
        return {"cosines of tokens [B, T, Q / heads / 2]": part, "sines of tokens [B, T, Q / heads / 2]": part}

    @property
    def _query_and_key_norms(self) -> Table:
        return self._head_norm("query") | self._head_norm("key")

    def _head_norm(self, name: Literal["query", "key"]) -> Table:
        t, model = self._tensors, self.sizes.model
        if model.attention.query_key_norm == "None":
            return {}
        features = model.query_size if name == "query" else self._key_features
        heads = features // model.head_size if model.attention.query_key_norm == "PerHead" else 1
        saved = {
            f"{name} before its norm, of the norm's type": t.normed(features),
            f"inverse root of the mean square of each {name}, accumulation": t.of(
                self.tokens * heads, t.accumulation_bytes
            ),
        }
        wide = t.of(self.tokens * features, t.accumulation_bytes)
        return saved if t.is_fused else saved | {f"{name} before the weight, accumulation": wide}

    @property
    def _joined_spans(self) -> Table:
        """Copy of the output of attention, saved by the output projection, if attention is called for each document, or
        for parts of sequences."""
        t = self._tensors
        calls_each = self._has_parts or (self.sizes.masks_documents and not t.has_varlen_attention)
        return {"mixed values of all calls [B, T, Q]": t.query} if calls_each else {}

    @property
    def _feed_forward(self) -> Table:
        if self._is_mixture:
            return self._mixture
        is_saved = self._has_pre_norm and not self.is_selective
        source = {"input of the feed-forward part [B, T, H]": self._tensors.hidden} if is_saved else {}
        return source | self._mlp_intermediates

    @property
    def _mlp_intermediates(self) -> Table:
        return self._mlp_intermediates_of(self._tensors.intermediate)

    @property
    def _recomputed_intermediates(self) -> Table:
        return self._recomputed_intermediates_of(self._tensors.intermediate)

    def _mlp_intermediates_of(self, intermediate: int) -> Table:
        """Return the saved MLP intermediates. `intermediate`: bytes of [B, T, F]."""
        products = ["gate [B, T, F]", "up [B, T, F]"] if self._is_gated else ["up [B, T, F]"]
        return dict.fromkeys(products, intermediate) | ({} if self.is_selective else self._activations_of(intermediate))

    def _recomputed_intermediates_of(self, intermediate: int) -> Table:
        """Return the MLP intermediates that are recomputed when the MLP's backward pass starts."""
        return self._activations_of(intermediate) if self.is_selective else {}

    def _activations_of(self, intermediate: int) -> Table:
        names = ["activation [B, T, F]", *(["activation times up [B, T, F]"] if self._is_gated else [])]
        return dict.fromkeys(names, intermediate)

    @property
    def _mixture(self) -> Table:
        """Tensors saved by the router and the experts, as if no expert were ever full."""
        experts = self.sizes.model.experts
        assert experts is not None, "only a mixture has a router and experts"
        routed = self._prototypes if experts.top_k is None else self._top_k(experts.top_k)
        return self._router | self._row_offsets | routed

    @property
    def _router(self) -> Table:
        t, model, experts = self._tensors, self.sizes.model, self.sizes.model.experts
        assert experts is not None, "only a mixture has a router"
        upcasts = t.accumulation_bytes != self.sizes.compute_bytes
        return {
            # Without a pre-norm and a cast, the input is the sum of input and attention, already counted.
            "input of the router [B, T, H], accumulation": t.hidden_accumulation
            if upcasts or (self._has_pre_norm and not self.is_selective)
            else 0,
            "router [experts, H], accumulation": t.of(experts.count * model.hidden_size, t.accumulation_bytes)
            if upcasts
            else 0,
            "probabilities [B, T, experts], accumulation": t.of(self.tokens * experts.count, t.accumulation_bytes),
        }

    @property
    def _row_offsets(self) -> Table:
        """Row offsets that torch's grouped matrix product saves."""
        t, experts = self._tensors, self.sizes.model.experts
        assert experts is not None, "only a mixture has experts"
        is_grouped = self.sizes.compute_bytes == 2 if t.is_fused else self.sizes.compute_bytes <= 4
        return {"ends of the rows of each expert [experts], int32": t.of(experts.count, 4)} if is_grouped else {}

    @property
    def _expert_outputs(self) -> Table:
        """Outputs of experts that are saved until the backward pass of their sum."""
        t, experts = self._tensors, self.sizes.model.experts
        assert experts is not None, "only a mixture has experts"
        table = {"outputs [N, H]": t.hidden}
        if experts.top_k is None:
            table["outputs times gates [N, H]"] = t.hidden
        return {name: self.sizes.choices * size for name, size in table.items()}

    @property
    def _prototypes(self) -> Table:
        """Tensors saved by prototypes. Each prototype processes all N tokens once, so it saves as many MLP
        intermediates as a block without experts."""
        t = self._tensors
        of_prototype = {
            "tokens in the order of the experts [N, H]": t.hidden,
            "gates [N]": t.of(self.tokens, self.sizes.compute_bytes),
            "choices [N], indices": t.of(self.tokens, _INDEX_BYTES),
            "order [N], indices": t.of(self.tokens, _INDEX_BYTES),
        }
        table = {name: self.sizes.choices * size for name, size in (of_prototype | self._mlp_intermediates).items()}
        return self._router_statistics | self._expert_outputs | table

    @property
    def _router_statistics(self) -> Table:
        t, experts = self._tensors, self.sizes.model.experts
        assert experts is not None, "only a mixture has router statistics"
        return {"router statistics [experts + 3], float64": t.of(experts.count + 3, 8)}

    def _top_k(self, spec: TopK) -> Table:
        """Return the tensors saved by the k choices and by shared experts. Each choice processes all N tokens once, and
        shared experts process them once more."""
        t, compute, wide = self._tensors, self.sizes.compute_bytes, self._tensors.accumulation_bytes
        of_choice = {
            "tokens in the order of the experts [N, H]": t.hidden,
            "weights [N]": t.of(self.tokens, compute),
            "choices [N], indices": t.of(self.tokens, _INDEX_BYTES),
            "order [N], indices": t.of(self.tokens, _INDEX_BYTES),
            "order back [N], indices": t.of(self.tokens, _INDEX_BYTES),
        }
        if spec.weights == "Renormalised":
            of_choice["scores [N], accumulation"] = t.of(self.tokens, wide)
        table = {name: spec.per_token * size for name, size in (of_choice | self._mlp_intermediates).items()}
        if spec.weights == "Renormalised":
            table["sums of the scores [N, 1], accumulation"] = t.of(self.tokens, wide)
        return table | self._expert_outputs | self._balance(spec) | self._shared_experts

    @property
    def _shared_experts(self) -> Table:
        """Tensors saved by shared experts, which process all tokens."""
        t = self._tensors
        if self.sizes.model.shared_expert is None:
            return {}
        shared = {
            f"{name}, of shared experts": size
            for name, size in self._mlp_intermediates_of(t.shared_intermediate).items()
        }
        if t.accumulation_bytes != self.sizes.compute_bytes and not (self._has_pre_norm and self.is_selective):
            shared["input of shared experts [B, T, H]"] = t.hidden
        return shared

    def _balance(self, spec: TopK) -> Table:
        """Return the tensors saved by the router statistics and the auxiliary loss."""
        t, experts = self._tensors, self.sizes.model.experts
        assert experts is not None, "only a mixture has router statistics"
        table = self._router_statistics
        if float(spec.router_z_loss):
            table["outputs of the router [B, T, experts], accumulation"] = t.of(
                self.tokens * experts.count, t.accumulation_bytes
            )
            table["logarithms of their sums [B, T], accumulation"] = t.of(self.tokens, t.accumulation_bytes)
        if float(spec.auxiliary_loss):
            of_steps, sequences = spec.balance_over == "Step", self.tokens // self.sizes.model.sequence_length
            name = "sums of the probabilities [experts]" if of_steps else "shares of choices [B, experts]"
            table[f"{name}, accumulation"] = t.of((1 if of_steps else sequences) * experts.count, t.accumulation_bytes)
            if spec.score == "Sigmoid":
                table["sums of all scores [N, 1], accumulation"] = t.of(self.tokens, t.accumulation_bytes)
        return table

    @property
    def _has_parts(self) -> bool:
        """Whether the queries of a pass are a part of each sequence (`model.context`)."""
        return self.context_ranks > 1 or self.chunk is not None

    @property
    def _is_mixture(self) -> bool:
        return self.sizes.model.has_experts(self.layer)

    @property
    def _has_pre_norm(self) -> bool:
        return self.sizes.model.norm.placement != "Post"

    @property
    def _has_post_norm(self) -> bool:
        return self.sizes.model.norm.placement != "Pre"

    @property
    def _is_gated(self) -> bool:
        return self.sizes.model.feed_forward.activation == "SwiGLU"


def total(*tables: Table) -> int:
    return sum(sum(table.values()) for table in tables)

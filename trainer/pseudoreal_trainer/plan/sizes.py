"""Sizes of a phase: everything besides the layout that byte counts depend on. Pure."""

from dataclasses import dataclass
from math import prod
from typing import Literal

from pseudoreal_api.spec.model import Model
from pseudoreal_api.spec.optimizer import MOMENT_BLOCK as BLOCK
from pseudoreal_api.spec.optimizer import GradientFormat, MomentFormat, ProductFormat

from pseudoreal_trainer.plan.layout import Layout
from pseudoreal_trainer.plan.records import Leg
from pseudoreal_trainer.plan.units import PAGE_ELEMENTS, VECTOR, Unit

Device = Literal["cpu", "accelerator"]
"""Type of the device that trains, as in torch."""

MOMENTS = 2
"""Number of AdamW's moment vectors per vector of master weights."""

BASE_BYTES = 1
"""Bytes of a block of moments besides one for each element."""
_BFLOAT16_BYTES = 2

_ROUNDED_GRADIENT: dict[Device, int] = {"cpu": 1 << 18, "accelerator": 1 << 21}
"""Number of elements of a gradient that are rounded at a time: on the CPU few enough to stay in a core's cache."""

_LOGIT_SHARE = 64
"""The logits of a chunk of the loss take at most the 64th part of a GPU's memory. Three to six tensors of this size
exist at once (`plan.memory.autograd_memory`). A larger part would mean fewer chunks; each chunk costs a sum over the
head's whole matrix."""
_LOGIT_BYTES = 256 << 20
"""The same for a CPU, and for a GPU of unknown memory."""
_MIN_LOGIT_BYTES = 16 << 20

_COMPUTE_BYTES = {"bfloat16": 2, "float32": 4, "float64": 8}
_ALLOCATED = {"cpu": 1, "accelerator": 512}
"""Allocation granularity in bytes: 1 on the CPU; on a GPU the smallest block of torch's caching allocator
(kMinBlockSize of CUDACachingAllocator, torch 2.11 to 2.15)."""


@dataclass(frozen=True)
class Sizes:
    model: Model
    units: tuple[Unit, ...]
    """Units as one rank has them: with expert parallelism, a unit of experts has only the rank's own experts."""
    compute_bytes: int
    """Bytes of an element in the forward and backward pass."""
    master_bytes: int
    """Bytes of an element of a master weight or a gradient, and of a moment with the format Master; see also
    `gradient_bytes`."""
    micro_batch: int
    """Number of sequences of a micro-batch, over all data ranks."""
    checkpoint_buffer: int = 0
    """Bytes of the buffer through which checkpoints pass."""
    device: Device = "cpu"
    device_memory: int | None = None
    """Bytes of a GPU's memory that the phase may use; None: not known."""
    threads: int = 1
    """Number of threads that a rank uses for one operation on the host."""
    has_z_loss: bool = False
    masks_documents: bool = False
    """True if tokens attend only within their document."""
    moments: MomentFormat = "Master"
    """Format in which moments are kept."""
    gradients: GradientFormat = "Master"
    """Format to which summed gradients are rounded."""
    products: ProductFormat = "Compute"
    """Format to which operands of products in blocks are rounded."""
    uses_muon: bool = False
    """True if Muon updates the matrices of attention, feed-forward parts and experts."""

    def without_second_moment(self, unit: int) -> int:
        """Return the number of elements, at the start of the unit's flat vector, for which no second moment is kept."""
        return without_second_moment(self.units[unit].hidden) if self.uses_muon else 0

    def omitted_state_bytes(self, unit: int) -> int:
        """Return the bytes that the unit's state lacks, because matrices of Muon have no second moment."""
        return self.moment_bytes(self.without_second_moment(unit))

    @property
    def rounds_gradients(self) -> bool:
        """True if summed gradients are rounded."""
        return self.gradients != "Master"

    @property
    def gradient_bytes(self) -> int:
        """Bytes of an element of a summed gradient on its way to a home other than the device, and there."""
        return _BFLOAT16_BYTES if self.rounds_gradients else self.master_bytes

    @property
    def rounds_moments(self) -> bool:
        """True if moments have fewer bytes than master weights."""
        return self.moments != "Master"

    def moment_bytes(self, elements: int) -> int:
        """Return the bytes of a moment of so many elements."""
        match self.moments:
            case "Master":
                return self.master_bytes * elements
            case "BFloat16":
                return _BFLOAT16_BYTES * elements
            case "Float8":
                return blocks_of(elements) * (BLOCK + BASE_BYTES)

    def state_bytes(self, elements: int) -> int:
        """Return the bytes of the master weights and both moments of so many elements."""
        return self.master_bytes * elements + MOMENTS * self.moment_bytes(elements)

    @property
    def has_own_copies(self) -> bool:
        """True if working copies differ in type from the master weights."""
        return self.compute_bytes != self.master_bytes

    def max_sequences(self, layout: Layout) -> int:
        """Return the maximum number of sequences of a micro-batch on a data rank; see `stream.rank_parts`."""
        return -(-self.micro_batch // layout.mesh.sequence_groups)

    def max_tokens(self, layout: Layout) -> int:
        """Return the maximum number of tokens of a micro-batch that a data rank takes as inputs."""
        return self.max_sequences(layout) * self.model.sequence_length // layout.sequence_ranks

    def loss_tokens(self, layout: Layout) -> int:
        """Return the maximum number of tokens of a micro-batch for which a rank of the head computes logits: with a
        slice of the vocabulary, the tokens of all tensor ranks."""
        return self.max_tokens(layout) * (layout.tensor_ranks if layout.slices_vocabulary else 1)

    @property
    def vocabulary_rows(self) -> int:
        """Number of rows of a rank's part of the embedding's matrix, and of the head's: one for each token of the
        vocabulary, or of the rank's slice of the vocabulary."""
        return self.units[0].parameters[0].shape[0]

    def key_size(self, layout: Layout) -> int:
        """Return the width of all key heads of a rank together."""
        return max(self.model.key_size // layout.tensor_ranks, self.model.head_size)

    def sliced_parts(self, layer: int) -> int:
        """Return the number of parts of a layer whose matrices tensor ranks cut: attention, and the MLP or the shared
        experts if the layer has them."""
        has_mlp = not self.model.has_experts(layer) or self.model.shared_expert is not None
        return 1 + has_mlp

    def allocated(self, size: int) -> int:
        """Return the device bytes that a tensor of `size` bytes takes."""
        unit = _ALLOCATED[self.device]
        return -(-size // unit) * unit

    def boundary(self, tokens: int) -> int:
        """Return the device bytes of the tensor passed from position to position, [B, T, H]."""
        return self.allocated(self.boundary_unrounded(tokens))

    def boundary_unrounded(self, tokens: int) -> int:
        return tokens * self.model.hidden_size * self.compute_bytes

    def block_flops(self, tokens: int, layer: int = 0, twice_the_pairs: int | None = None) -> int:
        """Return the floating-point operations of a layer's forward pass.

        Each token counts two operations for each matrix weight that it is multiplied by. Attention counts half of the
        tokens, or the tokens in its window. With experts, the matrices are the router, the token's own experts and the
        shared experts, as if no expert were full. `twice_the_pairs`: twice the number of (query, key) pairs, where
        documents are masked; None: pairs of whole sequences.
        """
        if twice_the_pairs is None:
            length = self.model.sequence_length
            window = min(self.model.window_of(layer) or length, length)
            # Averaged over the tokens of a sequence, a token attends to half of window * (2 - window / length) tokens.
            twice_the_pairs = tokens * window * (2 * length - window) // length
        return self._matrix_flops(tokens, layer) + self._attention_flops(twice_the_pairs)

    def pass_flops(self, tokens: int, layer: int) -> int:
        """Return the operations that the kernels of this pass execute. Under a mask, attention computes all pairs of
        tokens. With masked documents this is an upper bound, because the lengths of documents are unknown."""
        if not self.is_masked(layer):
            return self.block_flops(tokens, layer)
        return self._matrix_flops(tokens, layer) + self._attention_flops(2 * tokens * self.model.sequence_length)

    def _matrix_flops(self, tokens: int, layer: int) -> int:
        model = self.model
        return 2 * tokens * model.hidden_size * (2 * model.query_size + 2 * model.key_size + self._met(layer))

    def repeated_key_flops(self, layout: Layout, tokens: int) -> int:
        """Return the operations of keys and values in a layer's forward pass that other tensor ranks compute as well,
        because several ranks use the same key head."""
        repeated = layout.tensor_ranks * self.key_size(layout) - self.model.key_size
        return 2 * tokens * self.model.hidden_size * 2 * repeated

    def _attention_flops(self, twice_the_pairs: int) -> int:
        """`twice_the_pairs`: twice the number of (query, key) pairs."""
        return 2 * self.model.query_size * twice_the_pairs

    def _met(self, layer: int) -> int:
        """Return the number of rows, H wide each, of the router and the MLP matrices that a token is multiplied by."""
        model, matrices = self.model, 3 if self.model.feed_forward.activation == "SwiGLU" else 2
        if model.experts is None or not model.has_experts(layer):
            return matrices * model.feed_forward.size
        shared = model.shared_expert.size if model.shared_expert else 0
        return model.experts.count + matrices * (self.choices * model.expert.size + shared)

    @property
    def choices(self) -> int:
        """Number of experts per token, without shared experts."""
        experts = self.model.experts
        assert experts is not None, "the model has experts"
        return experts.top_k.per_token if experts.top_k else experts.prototypes

    @property
    def experts(self) -> int:
        """Number of experts of a layer with experts."""
        assert self.model.experts is not None, "the model has experts"
        return self.model.experts.count

    def exchange_bytes(self, tokens: int, leg: Leg) -> int:
        """Return the bytes of the rows that `tokens` tokens exchange with their experts: one row per choice. If
        gradients travel, each row has one more element for the weight."""
        gradients = leg in (Leg.COMBINE_GRADIENT, Leg.DISPATCH_GRADIENT)
        return self.choices * tokens * (self.model.hidden_size + gradients) * self.compute_bytes

    def unread_product_flops(self, tokens: int, layer: int) -> int:
        """Return the operations of the layer's last product, if a recomputed pass leaves it out; else 0. The gradients
        of experts and of a norm behind the MLP depend on the product."""
        if not self.leaves_out_last_product(layer):
            return 0
        return 2 * tokens * self.model.hidden_size * self.model.feed_forward.size

    def leaves_out_last_product(self, layer: int) -> bool:
        """Return whether a recomputed pass of the layer has no output (`model.layers.FeedForward.unread_sum`)."""
        return not self.model.has_experts(layer) and self.model.norm.placement == "Pre"

    def expert_flops(self, tokens: int) -> int:
        """Return the part of `block_flops` computed by routed experts."""
        matrices = 3 if self.model.expert.activation == "SwiGLU" else 2
        return 2 * tokens * self.model.hidden_size * matrices * self.choices * self.model.expert.size

    def units_of_layer(self, layer: int) -> list[Unit]:
        """Return units with the same parameters as the units of this layer."""
        has_experts = self.model.has_experts(layer)
        blocks = [unit for unit in self.units[1:] if not unit.is_experts and unit.is_of_mixture == has_experts]
        experts = [unit for unit in self.units if unit.is_experts]
        return [blocks[0], *(experts[:1] if has_experts else [])]

    def is_masked(self, layer: int) -> bool:
        """Return True if a layer's attention has a mask: a window shorter than a sequence."""
        window = self.model.window_of(layer)
        return window is not None and window < self.model.sequence_length

    def kind(self, layer: int) -> tuple[bool, bool]:
        """Return the properties in which the passes of layers differ: mask, experts."""
        return self.is_masked(layer), self.model.has_experts(layer)

    @property
    def mask(self) -> int:
        """Device bytes of the attention mask, [T, T], in the compute type; 0 if no layer has one. Layers share the
        mask."""
        is_needed = any(map(self.is_masked, range(self.model.layers)))
        return self.allocated(self.model.sequence_length**2 * self.compute_bytes) if is_needed else 0

    def shard(self, layout: Layout, unit: int) -> int:
        """Return the number of elements of a unit's state on each rank that holds a shard."""
        return self.units[unit].shard_length(layout.shards(unit))

    def whole(self, layout: Layout, unit: int) -> int:
        """Return the number of elements of all shards, with the padding at the end."""
        return self.shard(layout, unit) * layout.shards(unit)


assert VECTOR % BLOCK == 0, "shards and pieces are cut between blocks of moments"


def rounded_elements(longest: int, device: Device) -> int:
    """Return the number of elements of the scratch memory for rounding gradients of at most `longest` elements."""
    return min(longest, _ROUNDED_GRADIENT[device])


def blocks_of(elements: int) -> int:
    """Return the number of blocks of so many elements; the last one may be shorter."""
    return -(-elements // BLOCK)


def fills_blocks(unit: Unit) -> bool:
    """Return True if each tensor of the unit that AdamW updates, or the part of each expert in it, has whole blocks."""
    trained = (one for one in unit.parameters if not one.is_balancing)
    return all(prod(one.whole[one.experts is not None :]) % BLOCK == 0 for one in trained)


def without_second_moment(hidden: int) -> int:
    """Return the number of elements for which a unit keeps no second moment if Muon updates its first `hidden`
    elements: whole pages, so that what is kept can be read from a disk and written together with the weights."""
    return hidden // PAGE_ELEMENTS * PAGE_ELEMENTS


def compute_bytes(compute: str) -> int:
    return _COMPUTE_BYTES[compute]


def master_bytes(compute: str) -> int:
    """Return the bytes of an element of a master weight: float32, or float64 if the compute type is float64."""
    return max(4, _COMPUTE_BYTES[compute])


def logit_bytes(device: Device, memory: int | None) -> int:
    """Return the maximum bytes of logits in memory at a time, in the dtype of the loss. `memory`: see
    `Sizes.device_memory`.

    A power of two on GPUs, so that the memory of two GPUs of one kind, which may differ by some bytes, gives the same
    chunks. On a CPU memory gives no reason to choose: more logits than 256 MiB make no step faster.
    """
    if device == "cpu" or memory is None:
        return _LOGIT_BYTES
    return max(_MIN_LOGIT_BYTES, 1 << max(0, (memory // _LOGIT_SHARE).bit_length() - 1))


def loss_chunk_limit(vocabulary: int, width: int, most_bytes: int) -> int:
    """Return the maximum number of tokens of a chunk, for logits of `width` bytes each. `most_bytes`: maximum bytes of
    the logits of a chunk."""
    return max(1, most_bytes // (vocabulary * width))


def loss_chunk_length(tokens: int, most: int | None) -> int:
    """Return the number of tokens per chunk, for the fewest chunks of at most `most` tokens (None: one chunk). All
    chunks have this length, except that the last may be shorter. At least 1, even without tokens."""
    if most is None or tokens <= most:
        return max(1, tokens)
    return -(-tokens // -(-tokens // most))

"""Disk space that a job needs: for offloaded state on the node of each pod, and for the checkpoints in its claim. Pure.

Both are twice the calculated need. A volume on a node has a limit, so that no fault fills the node's disk: a full disk
would evict other pods as well.
"""

from dataclasses import dataclass
from itertools import pairwise

from pseudoreal_api.resolved.cache import cache_per_object
from pseudoreal_api.resolved.layers import number_of_blocks, sets_of_experts
from pseudoreal_api.resolved.resolve import explicit_sharing, last_steps, model_of, rank_counts, state_sharding
from pseudoreal_api.spec.job import PseudoRealJobSpec
from pseudoreal_api.spec.model import FeedForward, Model
from pseudoreal_api.spec.phase import Phase, Sharing

_SPARE = 2
_LEAST = 2**30
"""Bytes added to each calculated size, for the rounding of file sizes and for the file system's own data."""
_WORDS = 5
"""Maximum number of values per parameter, each as large as a master weight: weight, two moments, gradient, and a copy
in the compute type."""


def size_limit(spec: PseudoRealJobSpec, phase: Phase) -> str:
    """Return the size limit of the volume for offloaded state, as a quantity."""
    ranks = rank_counts(spec, phase)
    shards = 1 if state_sharding(spec, phase, ranks) == "None" else ranks.data_ranks
    # A rank has at most as many blocks, and as many sets of experts, as layers.
    model = model_of(spec, phase)
    layers, owned = -(-model.layers // ranks.pipeline), _Owned.of(model, explicit_sharing(spec, phase))
    blocks, experts = min(owned.dense + owned.mixtures, layers), min(owned.sets, layers)
    parameters = (blocks * _largest_block(model) + experts * _experts(model) + _ends(model)) // shards
    return _quantity(parameters * _WORDS * _word(spec) * ranks.processes_per_worker)


@cache_per_object
def claim_size(spec: PseudoRealJobSpec) -> str:
    """Return the size of a claim for all checkpoints that the job keeps at a time, as a quantity."""
    sizes = [_checkpoint(spec, phase) for phase in spec.phases]
    # Checkpoints at the ends of phases, the newest checkpoints, and a checkpoint that is being written.
    needed = sum(sizes) + (spec.checkpoint.keep_last + 1) * max(sizes)
    if every := spec.checkpoint.keep_every:
        spans = pairwise([0, *last_steps(spec)])
        needed += sum((end // every - begin // every) * size for (begin, end), size in zip(spans, sizes, strict=True))
    return _quantity(needed)


def _checkpoint(spec: PseudoRealJobSpec, phase: Phase) -> int:
    """Return the bytes of a checkpoint in a phase: master weights and two moments."""
    model = model_of(spec, phase)
    return 3 * _word(spec) * (_Owned.of(model, explicit_sharing(spec, phase)).parameters(model) + _ends(model))


def _word(spec: PseudoRealJobSpec) -> int:
    """Return the bytes of a number of the master type."""
    return 8 if spec.precision.compute == "float64" else 4


def _quantity(needed: int) -> str:
    return f"{-(-(_SPARE * needed + _LEAST) // 2**20)}Mi"


@dataclass(frozen=True)
class _Owned:
    """Numbers of distinct blocks and of distinct sets of experts that the layers have, shared or not."""

    dense: int
    mixtures: int
    """Number of distinct blocks of layers with experts, without the experts themselves."""
    sets: int
    """Number of distinct sets of experts."""

    @classmethod
    def of(cls, model: Model, sharing: Sharing) -> "_Owned":
        blocks, sets = number_of_blocks(sharing, model.layers), len(sets_of_experts(sharing, model))
        # Layers without experts share no block with layers that have experts. If layers share experts alone, each layer
        # has its own block.
        mixtures = model.layers_with_experts if sharing.shares_experts_alone else sets
        return cls(blocks - mixtures, mixtures, sets)

    def parameters(self, model: Model) -> int:
        dense, mixture = (_block(model, has_experts=kind) for kind in (False, True))
        return self.dense * dense + self.mixtures * mixture + self.sets * _experts(model)


def _largest_block(model: Model) -> int:
    kinds = {model.layers_with_experts > 0, model.layers_with_experts == model.layers}
    return max(_block(model, has_experts=kind) for kind in kinds)


def _block(model: Model, *, has_experts: bool) -> int:
    norms = (4 if model.norm.placement == "Both" else 2) * model.hidden_size
    return _attention(model) + norms + (_router(model) if has_experts else _feed_forward(model, model.feed_forward))


def _router(model: Model) -> int:
    """Return the number of parameters of the router and the shared experts."""
    shared = _feed_forward(model, model.shared_expert) if model.shared_expert else 0
    return (model.experts.count if model.experts else 0) * model.hidden_size + shared


def _experts(model: Model) -> int:
    return model.experts.count * _feed_forward(model, model.expert) if model.experts else 0


def _attention(model: Model) -> int:
    hidden, query, key, spec = model.hidden_size, model.query_size, model.key_size, model.attention
    biases = {"None": 0, "QueryKeyValue": query + 2 * key, "All": query + 2 * key + hidden}[spec.bias]
    norms = {"None": 0, "PerHead": 2 * model.head_size, "AllHeads": query + key}[spec.query_key_norm]
    return 2 * hidden * (query + key) + biases + norms


def _feed_forward(model: Model, spec: FeedForward) -> int:
    matrices = 3 if spec.activation == "SwiGLU" else 2
    biases = (matrices - 1) * spec.size + model.hidden_size if spec.bias == "All" else 0
    return matrices * model.hidden_size * spec.size + biases


def _ends(model: Model) -> int:
    """Return the number of parameters of the embedding, and of the final norm with the head."""
    matrices = 1 if model.embeddings == "Tied" else 2
    return (matrices * model.vocabulary_size + 1) * model.hidden_size

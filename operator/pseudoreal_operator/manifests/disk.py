"""How much disk a job needs: for offloaded state on the node of each pod, and for the checkpoints in its claim. Pure.

Both are twice what is needed. A volume on a node has a limit so that nothing that goes wrong fills the node, which
would evict its other pods as well.
"""

from itertools import pairwise

from pseudoreal_api.resolved.resolve import explicit_sharing, last_steps, rank_counts
from pseudoreal_api.spec.job import PseudoRealJobSpec
from pseudoreal_api.spec.model import Model
from pseudoreal_api.spec.phase import Phase

_SPARE = 2
_LEAST = 2**30
"""Least bytes: files are rounded up, and a disk has its own needs."""
_TOKENS = 256
_WORDS = 5
"""Most words of the master type for each parameter: weight, two moments, gradient, a copy in the compute type."""


def size_limit(spec: PseudoRealJobSpec, phase: Phase) -> str:
    """The size limit of the volume, as a quantity."""
    ranks = rank_counts(spec, phase)
    data_ranks = ranks.workers * ranks.processes_per_worker // ranks.pipeline
    shards = 1 if phase.parallelism.state_sharding == "None" else data_ranks
    blocks = min(explicit_sharing(spec, phase).blocks, -(-spec.model.layers // ranks.pipeline))
    parameters = (blocks * _block(spec.model) + _ends(spec.model)) // shards
    return _quantity(parameters * _WORDS * _word(spec) * ranks.processes_per_worker)


def claim_size(spec: PseudoRealJobSpec) -> str:
    """The size of a claim for all checkpoints that the job keeps at a time, as a quantity."""
    sizes = [_checkpoint(spec, phase) for phase in spec.phases]
    # Those at the ends of phases, the newest ones, and one that is being written.
    needed = sum(sizes) + (spec.checkpoint.keep_last + 1) * max(sizes)
    if every := spec.checkpoint.keep_every:
        spans = pairwise([0, *last_steps(spec)])
        needed += sum((end // every - begin // every) * size for (begin, end), size in zip(spans, sizes, strict=True))
    return _quantity(needed)


def _checkpoint(spec: PseudoRealJobSpec, phase: Phase) -> int:
    """Bytes of a checkpoint in a phase: master weights and two moments."""
    blocks = explicit_sharing(spec, phase).blocks
    return 3 * _word(spec) * (blocks * _block(spec.model) + _ends(spec.model))


def _word(spec: PseudoRealJobSpec) -> int:
    """Bytes of a number of the master type."""
    return 8 if spec.precision.compute == "float64" else 4


def _quantity(needed: int) -> str:
    return f"{-(-(_SPARE * needed + _LEAST) // 2**20)}Mi"


def _block(model: Model) -> int:
    hidden, matrices = model.hidden_size, 3 if model.feed_forward.activation == "SwiGLU" else 2
    feed_forward = matrices * hidden * model.feed_forward.size
    experts = model.experts.count if model.experts else 1
    router = experts * hidden if model.experts else 0
    return 4 * hidden * hidden + 2 * hidden + router + experts * feed_forward


def _ends(model: Model) -> int:
    """Parameters of the embedding, and of the final norm with the head."""
    return (2 * _TOKENS + 1) * model.hidden_size

"""How much a pod may write to the disk of its node for offloaded state: twice what it needs, so that nothing that goes
wrong fills the node, which would evict its other pods as well. Pure.
"""

from pseudoreal_api.resolved.resolve import explicit_sharing, rank_counts
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
    shards = 1 if phase.parallelism.state_sharding == "none" else data_ranks
    blocks = min(explicit_sharing(spec, phase).blocks, -(-spec.model.layers // ranks.pipeline))
    parameters = (blocks * _block(spec.model) + _ends(spec.model)) // shards
    word = 8 if spec.precision.compute == "float64" else 4
    needed = parameters * _WORDS * word * ranks.processes_per_worker
    return f"{-(-(_SPARE * needed + _LEAST) // 2**20)}Mi"


def _block(model: Model) -> int:
    hidden, matrices = model.hidden, 3 if model.ffn.activation == "swiglu" else 2
    feed_forward = matrices * hidden * model.ffn.hidden
    experts = model.moe.experts if model.moe else 1
    router = experts * hidden if model.moe else 0
    return 4 * hidden * hidden + 2 * hidden + router + experts * feed_forward


def _ends(model: Model) -> int:
    """Parameters of the embedding, and of the final norm with the head."""
    return (2 * _TOKENS + 1) * model.hidden

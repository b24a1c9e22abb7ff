"""The norm of the model."""

from pseudoreal_api.spec.model import Model
from torch import nn


def norm(spec: Model, size: int) -> nn.RMSNorm:
    """Return a root-mean-square norm over `size` features (Zhang and Sennrich 2019, arXiv 1910.07467)."""
    return nn.RMSNorm(size, eps=float(spec.norm.epsilon))

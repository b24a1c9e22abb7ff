"""torch's own AdamW as the engine's optimizer is defined: with its bound, its betas, and no decay of vectors."""

from collections.abc import Iterable, Sequence

import torch
from pseudoreal_api.spec.optimizer import Optimizer
from torch import nn

EPSILON = 1e-8


def adamw(parameters: Iterable[nn.Parameter], spec: Optimizer, rate: float, *, fused: bool = True) -> torch.optim.AdamW:
    """Decays what has more than one dimension."""
    everything = list(parameters)
    decayed, others = ([p for p in everything if (p.ndim > 1) == decays] for decays in (True, False))
    return adamw_of_groups(decayed, others, spec, rate, fused)


def adamw_of_groups(
    decayed: Sequence[nn.Parameter], others: Sequence[nn.Parameter], spec: Optimizer, rate: float, fused: bool = True
) -> torch.optim.AdamW:
    groups = [
        {"params": list(decayed), "weight_decay": float(spec.weight_decay)},
        {"params": list(others), "weight_decay": 0.0},
    ]
    betas = (float(spec.beta1), float(spec.beta2))
    return torch.optim.AdamW(groups, lr=rate, betas=betas, eps=EPSILON, fused=fused)

"""torch's own AdamW, set up as the engine's optimizer: with the same epsilon and betas, and without weight decay of
vectors and of excluded parameters."""

from collections.abc import Collection, Iterable, Sequence

import torch
from pseudoreal_api.spec.optimizer import Optimizer
from torch import nn

from tests.support.tensor_groups import figures_of


def adamw(
    parameters: Iterable[nn.Parameter],
    spec: Optimizer,
    rate: float,
    *,
    fused: bool = True,
    excluded: Collection[nn.Parameter] = (),
) -> torch.optim.AdamW:
    """Return AdamW with weight decay on parameters with more than one dimension, except the excluded ones."""
    everything, apart = list(parameters), {id(parameter) for parameter in excluded}
    decayed, others = (
        [p for p in everything if (p.ndim > 1 and id(p) not in apart) == decays] for decays in (True, False)
    )
    return adamw_of_groups(decayed, others, spec, rate, fused)


def adamw_of_groups(
    decayed: Sequence[nn.Parameter], others: Sequence[nn.Parameter], spec: Optimizer, rate: float, fused: bool = True
) -> torch.optim.AdamW:
    groups = [
        {"params": list(decayed), "weight_decay": float(spec.weight_decay)},
        {"params": list(others), "weight_decay": 0.0},
    ]
    betas = (float(spec.beta1), float(spec.beta2))
    return torch.optim.AdamW(groups, lr=rate, betas=betas, eps=float(spec.epsilon), fused=fused)


def adamw_of_tensors(parameters: Iterable[tuple[str, nn.Parameter]], spec: Optimizer, rate: float) -> torch.optim.AdamW:
    """Return AdamW with one parameter group per tensor, with the learning rate and weight decay of its name."""
    figures = [(parameter, figures_of(name, spec)) for name, parameter in parameters]
    groups = [{"params": [p], "lr": rate * factor, "weight_decay": decay} for p, (factor, decay) in figures]
    betas = (float(spec.beta1), float(spec.beta2))
    return torch.optim.AdamW(groups, lr=rate, betas=betas, eps=float(spec.epsilon), fused=True)

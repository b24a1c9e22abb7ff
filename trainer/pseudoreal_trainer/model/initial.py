"""The first weights of a unit, drawn from the job's seed and the unit's index alone, so that any rank can make them."""

from math import sqrt

import numpy as np
import torch
from torch import Tensor

from pseudoreal_trainer.plan.units import EMBEDDING, Parameter, Unit


def initial_weights(unit: Unit, index: int, layers: int, seed: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Parameter -> its first values, on the CPU. Biases start at zero, norms at one, matrices with a normal
    distribution."""
    generator = torch.Generator().manual_seed(int(np.random.SeedSequence([seed, index]).generate_state(1)[0]))
    return {parameter.name: _drawn(unit, parameter, layers, dtype, generator) for parameter in unit.parameters}


def _drawn(unit: Unit, parameter: Parameter, layers: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    if not parameter.is_matrix:
        return (torch.zeros if parameter.is_bias else torch.ones)(parameter.shape, dtype=dtype)
    std = _std(unit, parameter, layers)
    return torch.empty(parameter.shape, dtype=dtype).normal_(std=std, generator=generator)


def _std(unit: Unit, matrix: Parameter, layers: int) -> float:
    """Standard deviation that keeps the size of the features through each matrix; the sum of all layers' outputs adds
    up to about one (Radford et al. 2019, GPT-2: residual projections divided by the root of their number)."""
    if unit.name == EMBEDDING:
        return 1.0
    std = 1.0 / sqrt(matrix.shape[1])
    if matrix.name.endswith((".output.weight", ".down.weight")):
        return std / sqrt(2 * layers)
    return std

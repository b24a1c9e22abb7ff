"""Initial weights of a unit. They depend only on the job's seed, the unit's index and, for experts, the expert's
number, so any rank can draw them."""

from dataclasses import dataclass, replace
from math import sqrt
from typing import Literal

import numpy as np
import torch
from pseudoreal_api.spec.model import Model
from torch import Tensor
from torch.nn.init import trunc_normal_

from pseudoreal_trainer.plan.units import Parameter, Unit

_SMALL = 0.02
_Role = Literal["embedding", "head", "residual", "up", "other"]


def initial_weights(unit: Unit, index: int, model: Model, seed: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return parameter -> initial values, on the CPU. Biases start at zero, norms at one, matrices with a normal
    distribution. The values of an expert do not depend on the unit's other experts."""
    if unit.experts is None:
        generator = _generator(seed, index)
        wholes = ((one, _draw(replace(one, slice=None), model, dtype, generator)) for one in unit.parameters)
        return {one.name: _sliced(one, whole) for one, whole in wholes}
    stacked = {one.name: torch.empty(one.shape, dtype=dtype) for one in unit.parameters}
    for row, number in enumerate(unit.experts):
        generator = _generator(seed, index, number)
        for parameter in unit.parameters:
            stacked[parameter.name][row] = _draw(_expert_parameter(parameter), model, dtype, generator)
    return stacked


def _sliced(parameter: Parameter, whole: Tensor) -> Tensor:
    """Return the parameter's part of a tensor."""
    if parameter.slice is None:
        return whole
    return whole.chunk(parameter.slice.count, parameter.slice.axis)[parameter.slice.index].contiguous()


def _expert_parameter(stacked: Parameter) -> Parameter:
    return Parameter(stacked.name, stacked.whole[1:])


def _generator(*seeds: int) -> torch.Generator:
    return torch.Generator().manual_seed(int(np.random.SeedSequence(seeds).generate_state(1)[0]))


def _draw(parameter: Parameter, model: Model, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    if not parameter.is_matrix:
        return (torch.zeros if parameter.is_bias else torch.ones)(parameter.shape, dtype=dtype)
    normal, values = _distribution(parameter, model), torch.empty(parameter.shape, dtype=dtype)
    if normal.bound is None:
        return values.normal_(std=normal.std, generator=generator)
    bound = normal.bound * normal.std
    return trunc_normal_(values, std=normal.std, a=-bound, b=bound, generator=generator)


@dataclass(frozen=True)
class _Normal:
    """A normal distribution around zero."""

    std: float
    bound: float | None = None
    """Standard deviations at which the distribution is truncated; None: no truncation."""


def _distribution(matrix: Parameter, model: Model) -> _Normal:
    """Return the distribution of a matrix's initial values.

    FanIn keeps the scale of features through each matrix, and gives the sum of all layers' outputs a scale of about one
    (Radford et al. 2019, GPT-2: residual projections divided by the root of their number). The other values are named
    after frameworks and models, and select their distributions. TorchTitan itself divides by the root of the layer's
    index; a block that several layers share has no single index.
    """
    role, fan_in, root = _role(matrix, model), 1.0 / sqrt(matrix.shape[1]), sqrt(2 * model.layers)
    match model.initial_weights:
        case "FanIn":
            return _Normal(1.0 if role == "embedding" else fan_in / root if role == "residual" else fan_in)
        case "HuggingFace":
            return _Normal(_SMALL)
        case "Megatron":
            return _Normal(_SMALL / root if role == "residual" else _SMALL)
        case "OLMo2":
            return _Normal(_SMALL, bound=3.0)
        case "TorchTitan" if role == "head":
            return _Normal(fan_in, bound=3.0)
        case "TorchTitan":
            is_divided = role == "residual" or (role == "up" and model.feed_forward.activation == "SwiGLU")
            return _Normal(1.0 if role == "embedding" else _SMALL / root if is_divided else _SMALL)


def _role(matrix: Parameter, model: Model) -> _Role:
    """Return the role of a matrix in the model. A tied matrix has the role of a head: with the initial values of an
    embedding, the first logits would be far too large."""
    if matrix.name == "embedding.weight":
        return "head" if model.embeddings == "Tied" else "embedding"
    if matrix.name == "head.weight":
        return "head"
    if matrix.name.endswith((".output.weight", ".down.weight")):
        return "residual"
    return "up" if matrix.name.endswith(".up.weight") else "other"

"""Rotary positions (Su et al. 2021, RoFormer, arXiv 2104.09864), optionally scaled for longer sequences (Llama 3.1,
YaRN)."""

from math import log, pi
from typing import Any

import torch
from pseudoreal_api.spec.model import Llama3Scaling, Model, Rotary, YarnScaling
from torch import Tensor
from torch.autograd.function import once_differentiable


def rotary(model: Model, length: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines of the positions' angles, [T, width of a head / 2], in the dtype of `like`."""
    spec = model.attention.rotary
    places = torch.arange(length, dtype=torch.float64, device=like.device)
    angles = places[:, None] * frequencies(spec, model.head_size, like.device)
    factor = _attention_factor(spec)
    return (angles.cos() * factor).to(like.dtype), (angles.sin() * factor).to(like.dtype)


def rotation_at(rotation: tuple[Tensor, Tensor], positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines at these positions, [B, T] -> [B, T, width of a head / 2].

    Attention depends only on differences of positions, so in exact arithmetic their start does not matter. The start
    matters for rounding: with positions from 0, a document is rounded as in a row of its own.
    """
    cosine, sine = rotation
    return cosine[positions], sine[positions]


def rotate(features: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Return the features [B, T, heads, width], rotated pair by pair: feature i with feature i + width / 2.

    `rotation`: cosines and sines, [T, width / 2] or [B, T, width / 2]; the same for all heads.
    """
    cosine, sine = (part.to(features.dtype).unsqueeze(-2) for part in rotation)
    out: Tensor = _Rotation.apply(features, cosine, sine)
    return out


class _Rotation(torch.autograd.Function):
    """`rotate` with cosines and sines [..., T, 1, width / 2], in the dtype of the features.

    Three kernels and one new tensor in each direction. Written with torch's operators, the sums take seven kernels and
    their backward pass eight, each with a new tensor. The backward pass is the transposed map: it rotates back.

    A rotated feature is the sum of a product with the cosine and a product with the sine. The latter is not rounded
    before it is added: never in bfloat16, and in wider types if the processor multiplies and adds in one instruction.
    """

    @staticmethod
    def forward(ctx: Any, features: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        ctx.save_for_backward(cosine, sine)
        return _rotated(features, cosine, sine, direction=1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        cosine, sine = ctx.saved_tensors
        return _rotated(gradient, cosine, sine, direction=-1), None, None


def _rotated(features: Tensor, cosine: Tensor, sine: Tensor, *, direction: int) -> Tensor:
    """Return the features, rotated by the angles (`direction` 1) or back (-1), in a new contiguous tensor."""
    out = torch.empty_like(features, memory_format=torch.contiguous_format)
    source, target = (tensor.unflatten(-1, (2, -1)) for tensor in (features, out))  # [B, T, heads, 2, width / 2]
    torch.mul(source, cosine.unsqueeze(-2), out=target)
    (first, second), (into_first, into_second) = source.unbind(-2), target.unbind(-2)
    into_first.addcmul_(second, sine, value=-direction)
    into_second.addcmul_(first, sine, value=direction)
    return out


def frequencies(spec: Rotary, width: int, device: torch.device) -> Tensor:
    """Return the radians per token by which each pair of a head of this width rotates, [width / 2], in float64."""
    base = float(spec.base)
    exponents = torch.arange(0, width, 2, dtype=torch.float64, device=device) / width
    plain = base**-exponents
    if spec.scaling is None:
        return plain
    if spec.scaling.llama3 is not None:
        return _llama3(spec.scaling.llama3, plain)
    assert spec.scaling.yarn is not None, "a scaling without Llama 3 settings has YaRN settings"
    return _yarn(spec.scaling.yarn, plain, base)


def _llama3(spec: Llama3Scaling, plain: Tensor) -> Tensor:
    """Return the frequencies of Llama 3.1 (transformers, `_compute_llama3_parameters`; its three cases are one clamped
    slope here)."""
    low, high = float(spec.low_frequency_factor), float(spec.high_frequency_factor)
    turns = spec.original_sequence_length * plain / (2 * pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return plain * (kept + (1 - kept) / float(spec.factor))


def _yarn(spec: YarnScaling, plain: Tensor, base: float) -> Tensor:
    """Return the frequencies of YaRN (Peng et al. 2023, arXiv 2309.00071, section 3.2). The ramp starts and ends at
    whole pairs."""
    width = 2 * len(plain)

    def pair(turns: float) -> float:
        """Return the fractional index of the pair that makes `turns` full turns over the original sequence length."""
        return width * log(spec.original_sequence_length / (2 * pi * turns)) / (2 * log(base))

    first = max(pair(float(spec.beta_fast)) // 1, 0)
    last = min(-(-pair(float(spec.beta_slow)) // 1), width - 1)
    last += 0.001 if last == first else 0
    ramp = torch.arange(len(plain), dtype=plain.dtype, device=plain.device)
    scaled = ((ramp - first) / (last - first)).clamp(0, 1)
    return plain / float(spec.factor) * scaled + plain * (1 - scaled)


def _attention_factor(spec: Rotary) -> float:
    yarn = spec.scaling.yarn if spec.scaling else None
    if yarn is None:
        return 1.0
    return float(yarn.attention_factor) if yarn.attention_factor else 0.1 * log(float(yarn.factor)) + 1.0

"""The rounding of moments, computed by other means than the engine: numpy's 64-bit integers and floats, tensor by
tensor, from the description in docs/engine.md."""

import hashlib

import numpy as np
import torch
from pseudoreal_api.spec.optimizer import MomentFormat
from torch import Tensor

MASK = (1 << 64) - 1


def splitmix(number: int) -> int:
    number = (number + 0x9E3779B97F4A7C15) & MASK
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & MASK
    return number ^ (number >> 31)


def random_halves(seed: int, name: str, indices: np.ndarray, update: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the 16 random bits of the first and of the second moment, for elements with these indices below 2^32."""
    digest = hashlib.blake2b(f"{seed} {name} 0".encode(), digest_size=8).digest()
    mixed = splitmix(int.from_bytes(digest, "little") ^ splitmix(update))
    words = signed(mixed % 2**32 + indices.astype(object) * (mixed // 2**32 | 1))
    for factor in (0x7FEB352D, 0x846CA68B):
        words = signed((words ^ (words >> 16)).astype(object) * factor)
    upper = words >> 16
    return (words ^ upper) & 0xFFFF, upper & 0xFFFF


def signed(words: np.ndarray) -> np.ndarray:
    """Return the numbers modulo 2^32, as signed numbers."""
    wrapped: np.ndarray = ((words + 2**31) % 2**32 - 2**31).astype(np.int64)
    return wrapped


def rounded(values: Tensor, halves: np.ndarray) -> Tensor:
    """Return the values, each rounded away from zero if its cut-off bits and the random ones add up to a carry."""
    bits = values.detach().float().contiguous().numpy().view(np.uint32).reshape(-1).astype(np.int64)
    upwards = (bits & 0xFFFF) + halves >= 1 << 16
    found = (((bits >> 16) + upwards) << 16).astype(np.uint32).view(np.float32)
    return torch.from_numpy(found.copy()).view(values.shape).to(values.dtype)


def in_blocks(values: Tensor, halves: np.ndarray | None, *, has_sign: bool) -> Tensor:
    """Return the values as 8-bit floats in blocks of 16; without halves rounded to the nearest, ties to even."""
    exact = values.detach().float().numpy().reshape(-1).astype(np.float64)
    # 3 bits of fraction, and 20 bits that are cut off; numbers below 2^-126 have the step of those above.
    exponents = np.maximum(np.frexp(exact)[1] - 1, -126)
    units = np.abs(exact) / np.exp2(exponents - 3.0)
    if halves is None:
        rounded_units = np.rint(units)
    else:
        whole = np.floor(units)
        rounded_units = whole + ((units - whole) * 2**20 + 16.0 * halves >= 2**20)
    found = rounded_units * np.exp2(exponents - 3.0)
    for begin in range(0, len(found), 16):
        block = found[begin : begin + 16]
        lowest = np.frexp(block.max())[1] - 1 - (15 if has_sign else 31)
        bound, smallest = (2.0**lowest, 1.125 * 2.0**lowest) if lowest > -127 else (0.0, 2.0**-129)
        block[(block > 0) & (block <= bound)] = 0 if has_sign else smallest
    return torch.from_numpy(np.copysign(found, exact)).view(values.shape).to(values.dtype)


def round_moments(
    parameters: dict[str, Tensor], optimizer: torch.optim.Optimizer, seed: int, update: int, moments: MomentFormat
) -> None:
    """Round both moments of torch's AdamW, in place."""
    if moments == "Master":
        return
    for name, parameter in parameters.items():
        state = optimizer.state[parameter]
        halves = random_halves(seed, name, np.arange(parameter.numel()), update)
        for kind, half in zip(("exp_avg", "exp_avg_sq"), halves, strict=True):
            has_sign, found = kind == "exp_avg", state[kind]
            found.copy_(rounded(found, half) if moments == "BFloat16" else in_blocks(found, half, has_sign=has_sign))

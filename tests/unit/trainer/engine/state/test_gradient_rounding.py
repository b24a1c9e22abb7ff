"""Gradients in bfloat16: the rounding, its memory, and updates with rounded gradients."""

from pathlib import Path

import numpy as np
import pytest
import torch
from pseudoreal_api.spec.optimizer import Optimizer
from pseudoreal_trainer.engine.ranks.trace import Trace
from pseudoreal_trainer.engine.state.direct_file import aligned_buffer
from pseudoreal_trainer.engine.state.disk import Staging, open_disk_states
from pseudoreal_trainer.engine.state.gradient_rounding import GradientRounding
from pseudoreal_trainer.engine.state.memory import AdamW, Shard, Slices
from pseudoreal_trainer.engine.state.muon import Muon
from pseudoreal_trainer.engine.state.pinned import BounceBuffers
from pseudoreal_trainer.plan.memory.pinned_arena import PUT_ELEMENTS
from pseudoreal_trainer.plan.sizes import rounded_elements
from pseudoreal_trainer.plan.units import KINDS
from pseudoreal_trainer.plan.update_ranges import UpdateRange
from torch import Tensor

CPU, RATE = torch.device("cpu"), 1e-2
PIECE = rounded_elements(1 << 40, "cpu")
TIE_TO_EVEN_DOWN, TIE_TO_EVEN_UP = 1 + 2**-8, 1 + 3 * 2**-8
BITS = [0, 1, 0x7FFF, 0x8000, 0x8001, 0x18000, 0x3F808000, 0x3F818000, 0x7F7F7FFF, 0x7F7F8000, 0x7F7FFFFF, 0x7F800000]
"""Bits of float32: zero, the smallest numbers, ties, the largest numbers that stay finite and that do not, infinity."""


def _nearest(values: Tensor) -> Tensor:
    """Return finite float32 rounded to bfloat16 by whole numbers: to the nearest, ties to the even one."""
    bits = values.numpy().view(np.uint32).astype(np.uint64)
    lower, upper = bits & 0xFFFF, bits >> 16
    upper += (lower > 0x8000) | ((lower == 0x8000) & (upper & 1 == 1))
    return torch.from_numpy((upper << 16).astype(np.uint32).view(np.float32).copy())


def _gradient(length: int) -> Tensor:
    gradient = torch.randn(length, generator=torch.Generator().manual_seed(length)) * 1e-3
    special = torch.from_numpy(np.array(BITS, np.uint32).view(np.float32).copy())
    special = torch.cat([special, -special])[:length]
    gradient[: len(special)] = special
    return gradient


@pytest.mark.parametrize("length", [1, 64, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE + 64])
def test_gradients_are_rounded_to_the_nearest_and_packed_in_their_own_memory(length: int) -> None:
    memory = torch.full((length + 64,), 5.0)
    memory[:length] = _gradient(length)
    gradient, rounding = memory[:length], GradientRounding(length, CPU)
    expected = _nearest(gradient)
    rounding.round(gradient)
    assert torch.equal(gradient, expected)
    packed = rounding.pack(gradient)
    assert packed.dtype == torch.bfloat16
    assert packed.data_ptr() == memory.data_ptr()
    assert torch.equal(packed.float(), expected)
    assert memory[length:].eq(5).all()


def test_values_that_are_no_numbers_stay_so() -> None:
    gradient = torch.tensor([float("nan"), float("inf"), -float("inf"), 3.4e38])
    rounding = GradientRounding(4, CPU)
    rounding.round(gradient)
    packed = rounding.pack(gradient)
    assert packed.isnan().tolist() == [True, False, False, False]
    assert packed.isinf().tolist() == [False, True, True, True], "what bfloat16 cannot hold is not finite"


@pytest.mark.parametrize("scale", [1.0, 0.3])
@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
def test_an_update_reads_a_rounded_gradient_as_the_same_numbers(scale: float, compute: torch.dtype) -> None:
    """The clipped gradient is not rounded again."""
    length = 3 * PIECE + 128
    rounded = torch.randn(length, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    results = []
    for gradient in (rounded, rounded.float()):
        weights, first, second = torch.ones(length), torch.zeros(length), torch.zeros(length)
        copy = None if compute == torch.float32 else torch.zeros(length, dtype=compute)
        slices = Slices(weights, first, second, gradient, copy, (UpdateRange(0, length, decay=0.1),))
        AdamW().update(Optimizer(), slices, 0, RATE, scale)
        results.append([weights, first, second, *([] if copy is None else [copy])])
    for mine, theirs in zip(*results, strict=True):
        assert torch.equal(mine, theirs)


def test_muon_reads_a_rounded_gradient_as_the_same_numbers() -> None:
    rounded = torch.randn(4096, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    results = []
    for gradient in (rounded, rounded.float()):
        direction, momentum = torch.zeros(4096), torch.ones(4096)
        Muon().accumulate(direction, momentum, gradient, 0.3)
        results.append(torch.cat([direction, momentum]))
    assert torch.equal(*results)


@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16])
def test_state_larger_than_a_bounce_buffer_comes_to_the_disk_in_parts(moments: torch.dtype, tmp_path: Path) -> None:
    """Bounce buffers are as large as a rounded gradient, half as large as the master weights."""
    length = 2 * PUT_ELEMENTS + 4160
    shard = Shard(
        0,
        length,
        (UpdateRange(0, length),),
        torch.float32,
        torch.bfloat16,
        moments,
        has_rounded_gradient=True,
    )
    passing = BounceBuffers([aligned_buffer(length * 2)])
    staging = {0: Staging([aligned_buffer(length * 2)])}
    state = open_disk_states(tmp_path, {0: shard}, staging, passing, AdamW(), Trace(0), keeps_gradients=True)[0]
    values = torch.arange(length).float().to(torch.bfloat16).float()
    for kind in KINDS:
        state.put(kind, values + KINDS.index(kind))
    for kind in KINDS:
        expected = (values + KINDS.index(kind)).to(shard.dtype_of(kind))
        assert torch.equal(state.part(kind, 0, length), expected)
    state.keep_gradient(torch.zeros(length, dtype=torch.bfloat16))
    state.update(Optimizer(), 0.0, 1.0)
    assert torch.equal(state.part("weights", 0, length), values)
    state.close()

"""Moments in blocks of 8-bit floats: the numbers, their rounding, and updates with them."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pseudoreal_api.spec.optimizer import MOMENT_BLOCK, Optimizer
from pseudoreal_trainer.engine.state.blocks import BLOCKS, put, stored_length, unpacked
from pseudoreal_trainer.engine.state.memory import AdamW, Slices
from pseudoreal_trainer.engine.state.rounding import MomentRounding, RandomRange
from pseudoreal_trainer.plan.units import KINDS, Kind
from pseudoreal_trainer.plan.update_ranges import UpdateRange
from torch import Tensor

from tests.support.rounding import in_blocks
from tests.unit.trainer.engine.state.support.pieces import PIECE

pytestmark = pytest.mark.processor

CPU, RATE, UPDATE = torch.device("cpu"), 1e-2, 7
MOMENTS = KINDS[1:]
HALVES = 1 << 16
LENGTH = 4 * PIECE


def _packed(kind: Kind, values: Tensor) -> Tensor:
    stored = torch.full((stored_length(len(values), BLOCKS),), 0xAA, dtype=BLOCKS)
    put(kind, values, stored)
    return stored


def _nearest(kind: Kind, values: Tensor) -> Tensor:
    return in_blocks(values, None, has_sign=kind == "first_moment")


def _random_values(kind: Kind, seed: int, spread: float, count: int = 1 << 14) -> Tensor:
    """Return numbers whose logarithms are normal, so that blocks are wider than their range if `spread` is large."""
    random = torch.Generator().manual_seed(seed)
    values = torch.randn(count, generator=random) * torch.exp(spread * torch.randn(count, generator=random))
    values[torch.rand(count, generator=random) < 0.05] = 0
    return values if kind == "first_moment" else values.square()


@pytest.mark.parametrize("kind", MOMENTS)
@pytest.mark.parametrize("spread", [0.1, 3.0, 8.0])
def test_a_moment_is_loaded_as_the_nearest_numbers_of_its_blocks(kind: Kind, spread: float) -> None:
    values = _random_values(kind, 1, spread)[:-5]
    assert unpacked(kind, _packed(kind, values), len(values)).float().equal(_nearest(kind, values))


@given(st.lists(st.floats(-(2.0**127), 2.0**127, width=32), min_size=1, max_size=40))
def test_every_float32_is_loaded_as_described(numbers: list[float]) -> None:
    """Denormal numbers, ties and huge numbers, too."""
    for kind in MOMENTS:
        values = torch.tensor(numbers) if kind == "first_moment" else torch.tensor(numbers).abs()
        assert unpacked(kind, _packed(kind, values), len(values)).float().equal(_nearest(kind, values))


def test_a_tie_is_loaded_as_the_even_number() -> None:
    values = torch.tensor([1 + 1 / 16, 1 + 3 / 16, -1 - 1 / 16, 1 + 1 / 16 + 2**-20])
    found = unpacked("first_moment", _packed("first_moment", values), 4)
    assert found.tolist() == [1, 1.25, -1, 1.125]


@pytest.mark.parametrize("kind", MOMENTS)
@pytest.mark.parametrize("spread", [0.1, 3.0, 8.0])
def test_moments_that_are_stored_and_loaded_again_have_the_same_bytes(kind: Kind, spread: float) -> None:
    """So a job that is resumed goes on with the same bits. In between, a checkpoint has the numbers in bfloat16."""
    stored = _packed(kind, _random_values(kind, 2, spread))
    numbers = unpacked(kind, stored, 1 << 14)
    assert numbers.dtype == torch.bfloat16
    assert _packed(kind, numbers.float()).equal(stored)


def test_all_codes_of_a_block_are_different_numbers() -> None:
    for kind, count, smallest in (("first_moment", 128, 1.125 * 2.0**-15), ("second_moment", 256, 1.125 * 2.0**-31)):
        bits = torch.arange(count, dtype=torch.int32) + 1023 - (count - 1)  # up to 1.875
        numbers = (bits << 20).view(torch.float32)
        numbers[0] = 0
        assert numbers[1] == smallest
        for number in numbers.tolist():
            values = torch.tensor([numbers[-1], *[number] * (MOMENT_BLOCK - 1)])
            assert unpacked(kind, _packed(kind, values), MOMENT_BLOCK).float().equal(values)  # type: ignore[arg-type]


def test_a_second_moment_does_not_become_zero_beside_a_large_one() -> None:
    """It divides: without this, an update would be as large as the first moment over epsilon."""
    values = torch.full((MOMENT_BLOCK,), 1e-30)
    values[3] = 1e9
    found = unpacked("second_moment", _packed("second_moment", values), MOMENT_BLOCK).float()
    assert (found >= 1e9 * 2.0**-32).all()
    assert found[3] == pytest.approx(1e9, rel=1 / 16)
    assert not unpacked("second_moment", _packed("second_moment", values * 0), MOMENT_BLOCK).any()


def _rounded(kind: Kind, values: Tensor, halves: Tensor, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """Return the moment after an update with these random bits."""
    length = len(values)
    rounding = MomentRounding(length, values.dtype, CPU, BLOCKS)
    monkeypatch.setattr(rounding, "_random_halves", lambda *_: (halves.clone(), halves.clone()))
    stored = [torch.zeros(stored_length(length, BLOCKS), dtype=BLOCKS) for _ in range(2)]
    rounding.widen(stored, length)
    rounding._moments[MOMENTS.index(kind)].copy_(values)
    rounding._moments[1 - MOMENTS.index(kind)].zero_()
    rounding.round_into(stored, (), 0, length, UPDATE)
    return rounding.widen(stored, length)[MOMENTS.index(kind)].clone()


@pytest.mark.parametrize("kind", MOMENTS)
@pytest.mark.parametrize("spread", [0.1, 3.0, 8.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_update_rounds_by_its_random_bits(
    kind: Kind, spread: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = _random_values(kind, 3, spread).to(dtype)
    halves = torch.randint(HALVES, (len(values),), dtype=torch.int32, generator=torch.Generator().manual_seed(4))
    expected = in_blocks(values, halves.numpy(), has_sign=kind == "first_moment")
    assert _rounded(kind, values, halves, monkeypatch).equal(expected)


@pytest.mark.parametrize("value", [0.0, 1.0, 1.001, 0.3, 1e-30, 3.1e-38, 3e38, 1 + 2**-4])
def test_rounding_over_all_random_bits_has_the_value_as_its_mean(value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """To 16 bits after the last one of the number."""
    every = torch.arange(HALVES, dtype=torch.int32)
    exact = (torch.tensor(value).view(torch.int32) & ~0xF).view(torch.float32).item()
    for kind in MOMENTS:
        assert _rounded(kind, torch.full((HALVES,), value), every, monkeypatch).double().mean() == exact
    assert _rounded("first_moment", torch.full((HALVES,), -value), every, monkeypatch).double().mean() == -exact


@pytest.mark.parametrize("bits", [0x7F800000, -0x800000, 0x7FC00000, -0x400000, 0x7FFFFFFF])
def test_moments_that_are_not_finite_do_not_become_finite(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.ones(HALVES)
    values[::MOMENT_BLOCK].view(torch.int32).fill_(bits)
    for kind in MOMENTS:
        found = _rounded(kind, values, torch.arange(HALVES, dtype=torch.int32), monkeypatch)
        assert not found[::MOMENT_BLOCK].isfinite().any()
        assert found[::MOMENT_BLOCK].isnan().all() == values[0].isnan()


def _slices(length: int, *, has_blocks: bool, **options: Any) -> Slices:
    """Return a vector with two ranges, whose moments are numbers of blocks in either case."""
    random = torch.Generator().manual_seed(length)
    weights, first, second, gradient = (torch.randn(length, generator=random) for _ in range(4))
    cut = length // 3 // MOMENT_BLOCK * MOMENT_BLOCK
    ranges = (UpdateRange(0, cut, decay=0.1), UpdateRange(cut, length, rate=0.5))
    bits = (RandomRange(0, cut, 5, 100), RandomRange(cut, length, 6, 0))
    first, second = _packed("first_moment", first), _packed("second_moment", second.square_())
    if not has_blocks:
        first, second = (unpacked(*moment, length).float() for moment in zip(MOMENTS, (first, second), strict=True))
    compute = torch.empty(length, dtype=torch.bfloat16)
    return Slices(weights, first, second, gradient, compute, ranges, random=bits, **options)


@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_an_update_packs_the_moments_of_a_float32_update(scale: float, optimizer: AdamW) -> None:
    length = 5 * PIECE + 7
    found, wide = (_slices(length, has_blocks=has_blocks) for has_blocks in (True, False))
    for step in range(3):
        optimizer.update(Optimizer(), found, step, RATE, scale)
        optimizer.update(Optimizer(), wide, step, RATE, scale)
        halves = MomentRounding(length, torch.float32, CPU, BLOCKS)._random_halves(wide.random, 0, length, step + 1)
        for kind, moment, half in zip(MOMENTS, (wide.first_moment, wide.second_moment), halves, strict=True):
            moment.copy_(in_blocks(moment, half.numpy(), has_sign=kind == "first_moment"))
        assert found.weights.equal(wide.weights)
        assert unpacked("first_moment", found.first_moment, length).float().equal(wide.first_moment)
        assert unpacked("second_moment", found.second_moment, length).float().equal(wide.second_moment)
        assert found.compute is not None
        assert found.compute.equal(found.weights.bfloat16())


def test_idle_elements_keep_their_bytes(optimizer: AdamW) -> None:
    slices = _slices(LENGTH, has_blocks=True)
    before = [moment.clone() for moment in (slices.first_moment, slices.second_moment)]
    begin, end = PIECE + MOMENT_BLOCK, 2 * PIECE - 5 * MOMENT_BLOCK
    kept = slice(stored_length(begin, BLOCKS), stored_length(end, BLOCKS))
    ranges = (UpdateRange(0, begin), UpdateRange(end, LENGTH))
    optimizer.update(Optimizer(), Slices(**{**vars(slices), "ranges": ranges}), 0, RATE, 1.0)
    for moment, then in zip((slices.first_moment, slices.second_moment), before, strict=True):
        assert moment[kept].equal(then[kept])
        assert not moment[: kept.start].equal(then[: kept.start])
        assert not moment[kept.stop :].equal(then[kept.stop :])


def test_the_previous_state_of_a_speculative_update_has_the_moments_as_they_were(optimizer: AdamW) -> None:
    before = _slices(LENGTH, has_blocks=True)
    previous = [torch.empty_like(each) for each in (before.weights, before.first_moment, before.second_moment)]
    found = _slices(LENGTH, has_blocks=True, previous=previous)
    optimizer.update(Optimizer(), found, 0, RATE, 1.0)
    for kept, then in zip(previous, (before.weights, before.first_moment, before.second_moment), strict=True):
        assert kept.equal(then)


def test_scratch_memory_of_blocks_has_the_planned_size(optimizer: AdamW) -> None:
    """24 bytes an element, as in bfloat16, 1 for its number, and 4 for each block."""
    optimizer.update(Optimizer(), _slices(7 * PIECE, has_blocks=True), 0, RATE, 1.0)
    workers = min(2, torch.get_num_threads())
    elements = torch.get_num_threads() * PIECE // workers
    for rounding in optimizer._roundings.values():
        assert rounding._blocks is not None
        own = (*rounding._moments, rounding._numbers, rounding._words, rounding._shifted)
        blocks = (rounding._blocks.codes, rounding._blocks.bases)
        assert sum(tensor.nbytes for tensor in (*own, *blocks)) == 21 * elements + 4 * elements // MOMENT_BLOCK
        assert rounding._blocks.numbers is rounding._shifted
    assert 0 < len(optimizer._roundings) <= workers


def test_a_second_moment_that_shrinks_slowly_follows_its_decay() -> None:
    """By 0.1 % a step: rounded to the nearest, it would stay at 1."""
    length, steps, spec = 1 << 14, 500, Optimizer(beta2="0.999")
    zeros, ones = torch.zeros(length), torch.ones(length)
    assert _nearest("second_moment", ones * 0.999).equal(ones)
    first, second = _packed("first_moment", zeros), _packed("second_moment", ones)
    bits = (RandomRange(0, length, 5, 0),)
    slices = Slices(zeros, first, second, zeros.clone(), None, (UpdateRange(0, length),), random=bits)
    optimizer = AdamW()
    for step in range(steps):
        optimizer.update(spec, slices, step, RATE, 1.0)
    mean = unpacked("second_moment", second, length).double().mean()
    assert mean == pytest.approx(0.999**steps, rel=1e-2)

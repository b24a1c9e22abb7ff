"""Moments in bfloat16: the random bits of the rounding, the rounding itself, and updates with it."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from pseudoreal_api.spec.model import Attention, FeedForward, Model
from pseudoreal_api.spec.optimizer import Optimizer
from pseudoreal_api.spec.phase import Sharing
from pseudoreal_trainer.engine.state.memory import AdamW, Slices
from pseudoreal_trainer.engine.state.rounding import MomentRounding, RandomRange, random_ranges
from pseudoreal_trainer.plan.parts import own_units, parts_of
from pseudoreal_trainer.plan.units import Unit, units_of
from pseudoreal_trainer.plan.update_ranges import UpdateRange
from torch import Tensor

from tests.support.rounding import random_halves, rounded
from tests.unit.trainer.engine.state.support.pieces import PIECE

pytestmark = pytest.mark.processor

CPU, SEED, UPDATE, RATE, SCALE = torch.device("cpu"), 11, 7, 1e-2, 0.3
HALVES = 1 << 16
COUNT = 1 << 18
FIVE_SIGMA = 5 / math.sqrt(COUNT)
"""Five standard deviations of the mean of `COUNT` independent values of variance 1."""
MODEL = Model.model_validate(
    {
        "layers": 1,
        "hiddenSize": 16,
        "attention": Attention(heads=2),
        "sequenceLength": 4,
        "feedForward": FeedForward(size=24),
        "experts": {"count": 6, "prototypes": 2},
    }
)
UNITS = units_of(MODEL, Sharing(blocks=1))


def _halves(ranges: Sequence[RandomRange], begin: int, length: int, update: int = UPDATE) -> tuple[Tensor, Tensor]:
    rounding = MomentRounding(length, torch.float32, CPU, torch.bfloat16)
    first, second = rounding._random_halves(ranges, begin, length, update)
    return first.clone(), second.clone()


def _halves_of_tensor(update: int = UPDATE, key: int = 5) -> tuple[Tensor, Tensor]:
    return _halves((RandomRange(0, COUNT, key, 0),), 0, COUNT, update)


def _expected(unit: Unit, update: int) -> tuple[Tensor, Tensor]:
    """Return the random bits of all elements of a unit, from the oracle."""
    found = [
        random_halves(SEED, part.name, np.arange(part.begin, part.end), update)
        for part in parts_of(unit, range(unit.numel))
    ]
    first, second = (torch.from_numpy(np.concatenate(halves)) for halves in zip(*found, strict=True))
    return first, second


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
@pytest.mark.parametrize("shards", [1, 3])
def test_random_bits_follow_from_seed_tensor_index_and_update(unit: Unit, shards: int) -> None:
    for update in (1, 2, 10**6):
        expected = _expected(unit, update)
        for rank in range(shards):
            elements = unit.shard(rank, shards)
            ranges = random_ranges(unit, elements, SEED)
            for begin, end in pairwise([0, len(elements) // 3, len(elements)]):
                stop = min(end, unit.numel - elements.start)
                for half, all_halves in zip(_halves(ranges, begin, end - begin, update), expected, strict=True):
                    there = all_halves[elements.start + begin : elements.start + stop]
                    assert half[: stop - begin].equal(there.to(torch.int32))


def test_random_bits_of_an_expert_do_not_depend_on_the_unit_that_it_is_in() -> None:
    whole = next(unit for unit in UNITS if unit.is_experts)
    names = {parameter.name for parameter in whole.parameters}
    bits: dict[str, Tensor] = {}
    for part in parts_of(whole, range(whole.numel)):
        ranges = random_ranges(whole, range(whole.numel), SEED)
        bits[part.name] = _halves(ranges, part.offset, part.end - part.begin)[0]
    for coordinate in range(2):
        for unit in own_units([whole], coordinate, 2, 3):
            for part in parts_of(unit, range(unit.numel)):
                ranges = random_ranges(unit, range(unit.numel), SEED)
                found = _halves(ranges, part.offset, part.end - part.begin)[0]
                assert found.equal(bits[part.name][part.begin : part.end])
                names.discard(part.name)
    assert not names


def test_random_bits_of_elements_beyond_2_to_the_32_have_a_key_of_their_own() -> None:
    """Such a tensor has 17 GB; only its ranges are made here."""
    unit, word = next(unit for unit in UNITS if unit.name == "embedding"), 1 << 32
    (parameter,) = unit.parameters
    huge = Unit(unit.name, (type(parameter)(parameter.name, (3 << 30, 2)),))
    assert huge.numel > word
    ranges = random_ranges(huge, range(word - 8, word + 8), SEED)
    assert [(one.begin, one.end, one.first) for one in ranges] == [(0, 8, word - 8), (8, 16, 0)]
    assert ranges[0].key != ranges[1].key
    first, _ = _halves(ranges, 0, 16)
    expected, _ = random_halves(SEED, parameter.name, np.arange(word - 8, word), UPDATE)
    assert first[:8].tolist() == expected.tolist()


def test_random_bits_are_uniform_and_uncorrelated() -> None:
    """Between neighbours, the two moments, updates in a row, and tensors."""
    bits = [half for update, key in ((1, 5), (2, 5), (1, 6)) for half in _halves_of_tensor(update, key)]
    values = [(half.double() / HALVES - 0.5) * math.sqrt(12) for half in bits]
    for value in values:
        assert abs(value.mean()) < FIVE_SIGMA
        assert abs((value * value).mean() - 1) < FIVE_SIGMA
        for lag in (1, 2, 16, 256, 4096):
            assert abs((value[lag:] * value[:-lag]).mean()) < FIVE_SIGMA, lag
    for index, value in enumerate(values):
        for other in values[index + 1 :]:
            assert abs((value * other).mean()) < FIVE_SIGMA
    for half in bits:
        counts = half.div(256, rounding_mode="floor").bincount(minlength=256)
        assert counts.double().sub(COUNT / 256).square().sum() / (COUNT / 256) < 400, "chi-square of 255, 6 sigma"


def test_random_bits_of_an_element_are_uniform_over_updates() -> None:
    first = torch.stack([_halves((RandomRange(0, 64, 5, 0),), 0, 64, update)[0] for update in range(1, 4097)])
    values = (first.double() / HALVES - 0.5) * math.sqrt(12)
    assert values.mean(dim=0).abs().max() < 5 / math.sqrt(len(values))
    assert (values[1:] * values[:-1]).mean(dim=0).abs().max() < 5 / math.sqrt(len(values))


VALUES = [0.0, 1.0, -1.0, 1.001, -0.3, 1e-30, 3.1e-39, -1e-45, 1 + 2**-8, 1 + 2**-23, 3.38e38]


def _round(value: float | Tensor, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the bfloat16 of a value for each of the 65,536 random halves."""
    rounding, every = MomentRounding(HALVES, dtype, CPU, torch.bfloat16), torch.arange(HALVES, dtype=torch.int32)
    monkeypatch.setattr(rounding, "_random_halves", lambda *_: (every.clone(), every.clone()))
    stored = [torch.zeros(HALVES, dtype=torch.bfloat16) for _ in range(2)]
    rounding.widen(stored, HALVES)
    for wide in rounding._moments:
        wide.copy_(torch.as_tensor(value))
    rounding.round_into(stored, (), 0, HALVES, UPDATE)
    assert stored[0].view(torch.int16).equal(stored[1].view(torch.int16))
    return stored[0]


@pytest.mark.parametrize("value", VALUES)
def test_rounding_over_all_random_bits_has_the_value_as_its_mean(value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exactly: sums of the neighbours are exact in float64."""
    single = torch.tensor(value, dtype=torch.float32)
    found = _round(single, monkeypatch)
    assert found.double().mean() == single.double()
    assert len(found.unique()) == (1 if single.bfloat16() == single else 2)


@pytest.mark.parametrize("bits", [0x7F800000, -0x800000, 0x7FC00000, -0x400000, 0x7FFFFFFF])
def test_moments_that_are_not_finite_do_not_become_finite(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Infinities, and the patterns by which processors and GPUs of today say that a result is not a number."""
    single = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    found = _round(single, monkeypatch)
    assert not found.isfinite().any()
    assert found.isnan().all() == single.isnan()


def test_moments_of_float64_masters_are_rounded_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _round(1.001, monkeypatch, torch.float64).equal(_round(1.001, monkeypatch))


def _slices(length: int, moments: torch.dtype, **options: Any) -> Slices:
    random = torch.Generator().manual_seed(length)
    weights, first, second, gradient = (torch.randn(length, generator=random) for _ in range(4))
    cut = length // 3
    ranges = (UpdateRange(0, cut, decay=0.1), UpdateRange(cut, length, rate=0.5))
    bits = (RandomRange(0, cut, 5, 100), RandomRange(cut, length, 6, 0))
    first, second = first.bfloat16(), second.square_().bfloat16()
    compute = torch.empty(length, dtype=torch.bfloat16)
    return Slices(weights, first.to(moments), second.to(moments), gradient, compute, ranges, random=bits, **options)


def _expected_bits(length: int, update: int) -> tuple[np.ndarray, np.ndarray]:
    halves = _halves(_slices(length, torch.float32).random, 0, length, update)
    return halves[0].numpy(), halves[1].numpy()


@pytest.mark.parametrize("scale", [1.0, SCALE])
def test_an_update_rounds_the_moments_of_a_float32_update(scale: float, optimizer: AdamW) -> None:
    length = 5 * PIECE + 7
    found, wide = (_slices(length, dtype) for dtype in (torch.bfloat16, torch.float32))
    for step in range(3):
        optimizer.update(Optimizer(), found, step, RATE, scale)
        optimizer.update(Optimizer(), wide, step, RATE, scale)
        for moment, half in zip((wide.first_moment, wide.second_moment), _expected_bits(length, step + 1), strict=True):
            moment.copy_(rounded(moment, half))
        assert found.weights.equal(wide.weights)
        assert found.first_moment.float().equal(wide.first_moment)
        assert found.second_moment.float().equal(wide.second_moment)
        assert found.compute is not None
        assert found.compute.equal(found.weights.bfloat16())


def test_scratch_memory_of_the_rounding_has_the_planned_size(optimizer: AdamW) -> None:
    optimizer.update(Optimizer(), _slices(7 * PIECE, torch.bfloat16), 0, RATE, 1.0)
    tensors = [
        tensor
        for rounding in optimizer._roundings.values()
        for tensor in (*rounding._moments, rounding._numbers, rounding._words, rounding._shifted)
    ]
    assert 0 < sum(tensor.nbytes for tensor in tensors) <= torch.get_num_threads() * 20 * PIECE


def test_the_previous_state_of_a_speculative_update_has_the_moments_as_they_were(optimizer: AdamW) -> None:
    length = 3 * PIECE
    before = _slices(length, torch.bfloat16)
    previous = [torch.empty_like(each) for each in (before.weights, before.first_moment, before.second_moment)]
    found = _slices(length, torch.bfloat16, previous=previous)
    optimizer.update(Optimizer(), found, 0, RATE, 1.0)
    for kept, then in zip(previous, (before.weights, before.first_moment, before.second_moment), strict=True):
        assert kept.equal(then)


def test_a_second_moment_that_shrinks_slowly_follows_its_decay() -> None:
    """By 0.01 % a step: rounded to the nearest, it would stay at 1."""
    length, steps, spec = 4096, 1000, Optimizer(beta2="0.9999")
    zeros, ones = torch.zeros(length), torch.ones(length, dtype=torch.bfloat16)
    nearest = (ones.float() * 0.9999).bfloat16()
    assert nearest.equal(ones)
    slices = Slices(
        zeros, torch.zeros_like(ones), ones, zeros.clone(), None, (UpdateRange(0, length),),
        random=(RandomRange(0, length, 5, 0),),
    )  # fmt: skip
    optimizer = AdamW()
    for step in range(steps):
        optimizer.update(spec, slices, step, RATE, 1.0)
    assert slices.second_moment.double().mean() == pytest.approx(0.9999**steps, rel=1e-3)

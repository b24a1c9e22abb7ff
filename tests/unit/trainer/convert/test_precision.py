"""Conversions between number types, compared with torch."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from pseudoreal_trainer.checkpoint.precision import narrow, widen

EVERY = np.arange(2**16, dtype=np.uint16)


def test_every_bfloat16_comes_back() -> None:
    expected = torch.from_numpy(EVERY.view(np.int16)).view(torch.bfloat16).float().numpy()
    found = widen(EVERY, "bfloat16", "float32")
    assert np.array_equal(found.view(np.uint32), expected.view(np.uint32))
    again = narrow(found, "bfloat16")
    is_number = ~np.isnan(found)
    assert np.array_equal(again[is_number], EVERY[is_number])
    assert np.isnan(widen(again[~is_number], "bfloat16", "float32")).all()


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1))
def test_numbers_are_rounded_as_torch_does(bits: list[int]) -> None:
    numbers = np.array(bits, dtype=np.uint32).view(np.float32)
    expected = torch.from_numpy(numbers).to(torch.bfloat16)
    found = torch.from_numpy(narrow(numbers, "bfloat16").view(np.int16)).view(torch.bfloat16)
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found[~found.isnan()], expected[~expected.isnan()])


def test_ties_go_to_the_even_number() -> None:
    low, high = 1.0, 1.0 + 2**-7
    ties = np.array([(low + high) / 2, (high + high + 2**-7) / 2], dtype=np.float32)
    assert widen(narrow(ties, "bfloat16"), "bfloat16", "float32").tolist() == [low, high + 2**-7]


def test_float64_is_kept() -> None:
    numbers = np.array([1.1, -2.2])
    assert narrow(numbers, "float64").tolist() == numbers.tolist()
    assert widen(numbers, "float64", "float64").tolist() == numbers.tolist()

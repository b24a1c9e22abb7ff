"""Squares and products of long vectors are right to 1e-6, however the vectors are cut into shards."""

from collections.abc import Callable
from math import sqrt

import pytest
import torch
from pseudoreal_trainer.engine.norms import dot, square_of
from torch import Tensor

RIGHT = 1e-6
VECTORS: dict[str, Callable[[int], Tensor]] = {
    "normal": torch.randn,
    "of one sign": lambda count: torch.rand(count) + 0.5,
    "all alike": lambda count: torch.full((count,), 0.1),
    "a few large": lambda count: torch.full((count,), 1e-4).index_fill_(0, torch.arange(0, count, 999), 1.0),
}
SHARDS = (1, 2, 3, 8)


def _exact(left: Tensor, right: Tensor) -> float:
    pairs = zip(left.split(1 << 20), right.split(1 << 20), strict=True)
    return sum(float((one.double() * other.double()).sum()) for one, other in pairs)


def _check(make: Callable[[int], Tensor], count: int) -> None:
    torch.manual_seed(7)
    vector, other = make(count), make(count)
    norm = sqrt(_exact(vector, vector))
    for shards in SHARDS:
        assert sqrt(sum(map(square_of, vector.chunk(shards)))) == pytest.approx(norm, rel=RIGHT)
    size = norm * sqrt(_exact(other, other))
    assert float(dot(vector, other)) == pytest.approx(_exact(vector, other), abs=RIGHT * size)


@pytest.mark.parametrize("name", [*VECTORS])
@pytest.mark.parametrize("count", [0, 1, 127, 128, 129, (1 << 22) + 5])
def test_square_of_is_accurate_for_vectors_of_any_length(name: str, count: int) -> None:
    _check(VECTORS[name], count)


@pytest.mark.long
@pytest.mark.parametrize("name", [*VECTORS])
def test_square_of_is_accurate_for_a_quarter_of_a_billion_elements(name: str) -> None:
    _check(VECTORS[name], 1 << 28)


def test_square_of_a_non_finite_vector_is_not_finite() -> None:
    for value in (torch.inf, -torch.inf, torch.nan):
        vector = torch.ones(1000)
        vector[513] = value
        assert not torch.tensor(square_of(vector)).isfinite()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_dot_product_is_in_float64(dtype: torch.dtype) -> None:
    vector = torch.ones(5, dtype=dtype)
    assert dot(vector, vector).dtype == torch.float64

"""Tensors that autograd does not keep, and that a backward pass computes again."""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pseudoreal_trainer.model.recomputation import Recomputed, mark_recomputed, pack, recomputing
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F


class Counted:
    """A function that counts its calls."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        self.function, self.calls, self.results = function, 0, list[weakref.ref[Tensor]]()

    def __call__(self, *inputs: Tensor) -> Tensor:
        self.calls += 1
        result = self.function(*inputs)
        self.results.append(weakref.ref(result))
        return result


def _pack(tensor: Tensor) -> Tensor | Recomputed:
    return pack(tensor) or tensor


def _unpack(saved: Any) -> Tensor:
    return saved.unpack() if isinstance(saved, Recomputed) else saved


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def forward(source: Tensor, weights: list[Tensor], function: Callable[[Tensor], Tensor]) -> Tensor:
    """Return a sum of three products of function(source): [2, 3, 8] -> [2, 3, 5]."""
    features = mark_recomputed(function(source), function, source)
    first, second, third = (features @ weight for weight in weights)
    return first * second + third


def gradients(function: Callable[[Tensor], Tensor], *, enabled: bool) -> tuple[Tensor, ...]:
    source = drawn(2, 3, 8).requires_grad_()
    weights = [drawn(8, 5).mul(n + 1).requires_grad_() for n in range(3)]
    with recomputing(enabled=enabled), saved_tensors_hooks(_pack, _unpack):
        output = forward(source, weights, function)
    return torch.autograd.grad(output.sum(), [source, *weights])


@pytest.mark.parametrize("function", [F.silu, F.gelu, lambda x: F.rms_norm(x, (8,))], ids=["silu", "gelu", "norm"])
def test_gradients_have_the_bits_of_kept_tensors(function: Callable[[Tensor], Tensor]) -> None:
    kept, recomputed = gradients(function, enabled=False), gradients(function, enabled=True)
    assert all(map(torch.equal, kept, recomputed))


def test_a_tensor_is_computed_again_once_for_all_of_its_readers_and_then_freed() -> None:
    silu, alive = Counted(F.silu), list[bool]()
    source, weights = drawn(2, 3, 8).requires_grad_(), [drawn(8, 5).requires_grad_() for _ in range(3)]
    source.register_hook(lambda _: alive.append(silu.results[1]() is not None))
    with recomputing(enabled=True), saved_tensors_hooks(_pack, _unpack):
        output = forward(source, weights, silu)
    torch.autograd.grad(output.sum(), [source, *weights])
    assert silu.calls == 2, "in the forward pass, and once for three products"
    assert alive == [False], "when the backward pass reaches the source"


def test_nothing_is_computed_again_outside_of_the_context() -> None:
    silu = Counted(F.silu)
    gradients(silu, enabled=False)
    assert silu.calls == 1


def test_the_marked_tensor_is_freed_with_the_forward_pass() -> None:
    silu = Counted(F.silu)
    source, weights = drawn(2, 3, 8).requires_grad_(), [drawn(8, 5).requires_grad_() for _ in range(3)]
    with recomputing(enabled=True), saved_tensors_hooks(_pack, _unpack):
        output = forward(source, weights, silu)
    assert silu.results[0]() is None
    del output


def test_a_tensor_in_the_place_of_a_freed_marked_one_is_kept() -> None:
    """The address alone would take the second tensor for the first."""
    memory = drawn(64)
    with recomputing(enabled=True):
        marked = mark_recomputed(memory[:], torch.neg, memory)
        assert pack(marked) is not None
        del marked
        assert pack(memory[:]) is None


def test_empty_tensors_are_kept() -> None:
    """All empty storages have one address."""
    empty = drawn(0, 4)
    with recomputing(enabled=True):
        mark_recomputed(empty, torch.neg, empty)
        assert pack(torch.empty(0, dtype=torch.int64)) is None


def test_contexts_nest() -> None:
    tensor = drawn(4)
    with recomputing(enabled=True):
        marked = mark_recomputed(tensor * 2, lambda x: x * 2, tensor)
        with recomputing(enabled=False):
            assert pack(marked) is None
        assert pack(marked) is not None
    assert pack(marked) is None

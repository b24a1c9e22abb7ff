"""Rotations of queries and keys against products of complex numbers: features i and i + width / 2 are the real and the
imaginary part of a number, and a rotation by an angle is the product with exp(i * angle)."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pseudoreal_trainer.model.rotary import rotate
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

ROWS, LENGTH, HEADS = 2, 11, 3
WIDTHS = [2, 6, 16, 22, 128]
"""Widths of heads, in features: from one pair, less than a vector register holds, to several registers of pairs."""
UNIT = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}
"""Greatest relative error of one rounding."""


def _drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _angles(width: int, *, is_of_documents: bool) -> Tensor:
    """Return an angle for each pair of a head, [T, width / 2], or [B, T, width / 2] as in documents."""
    rows = (ROWS,) if is_of_documents else ()
    return 7 * _drawn(*rows, LENGTH, width // 2, seed=1)


def _table(angles: Tensor, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    return angles.cos().to(dtype), angles.sin().to(dtype)


def _times(features: Tensor, factors: Tensor) -> Tensor:
    """Return the features [B, T, heads, width] times complex factors, [T, width / 2] or [B, T, width / 2]."""
    first, second = features.double().chunk(2, dim=-1)
    product = torch.complex(first, second) * factors.unsqueeze(-2)
    return torch.cat([product.real, product.imag], dim=-1)


def _both(features: Tensor, table: tuple[Tensor, Tensor], gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rotated features and the gradient of the features. `gradient`: gradient of the rotated features. All
    are [B, T, heads, width]."""
    features = features.detach().requires_grad_()
    rotated = rotate(features, table)
    return rotated.detach(), torch.autograd.grad(rotated, features, gradient)[0]


def _contiguous(tensor: Tensor) -> Tensor:
    return tensor


def _heads_first(tensor: Tensor) -> Tensor:
    """The same tensor in the layout [B, heads, T, width], in which some kernels of attention return gradients."""
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def _repeated(tensor: Tensor) -> Tensor:
    """One row for all, without memory of its own, as the gradient of a sum has it."""
    return tensor[:1].expand_as(tensor)


@pytest.mark.parametrize("layout", [_contiguous, _heads_first, _repeated])
@pytest.mark.parametrize("is_of_documents", [False, True])
@pytest.mark.parametrize("width", WIDTHS)
def test_rotation_is_a_complex_product_and_its_gradient_the_conjugate_one(
    width: int, is_of_documents: bool, layout: Callable[[Tensor], Tensor]
) -> None:
    shape, angles = (ROWS, LENGTH, HEADS, width), _angles(width, is_of_documents=is_of_documents)
    features, gradient = layout(_drawn(*shape)), layout(_drawn(*shape, seed=2))
    rotated, of_features = _both(features, _table(angles), gradient)
    factors = torch.polar(torch.ones_like(angles), angles)
    torch.testing.assert_close(rotated, _times(features, factors), rtol=0, atol=1e-14)
    torch.testing.assert_close(of_features, _times(gradient, factors.conj()), rtol=0, atol=1e-14)
    assert rotated.is_contiguous()
    assert of_features.is_contiguous(), "the projection's backward pass would copy any other layout"


@pytest.mark.parametrize("is_of_documents", [False, True])
def test_gradient_of_a_rotation_is_that_of_finite_differences(is_of_documents: bool) -> None:
    features = _drawn(ROWS, LENGTH, HEADS, 6).requires_grad_()
    table = _table(_angles(6, is_of_documents=is_of_documents))
    assert torch.autograd.gradcheck(lambda each: rotate(each, table), (features,))


@pytest.mark.parametrize("dtype", UNIT)
def test_one_product_of_each_sum_is_rounded(dtype: torch.dtype) -> None:
    """The oracle computes with the same rounded features, cosines and sines, in float64. So the difference comes from
    two roundings: of the product with the cosine, and of the sum. Some processors round the product with the sine, too,
    except in bfloat16."""
    features, table = _drawn(ROWS, LENGTH, HEADS, 128).to(dtype), _table(_angles(128, is_of_documents=False), dtype)
    cosine, sine = (part.double() for part in table)
    rotated = rotate(features, table)
    exact = _times(features, torch.complex(cosine, sine))
    of_cosine = features.double().abs() * torch.cat([cosine, cosine], dim=-1).abs().unsqueeze(-2)
    of_sine = _times(features.abs(), torch.complex(torch.zeros_like(sine), sine.abs())).abs()
    most = of_cosine + exact.abs() + (0 if dtype == torch.bfloat16 else of_sine)
    error = (rotated.double() - exact).abs()
    assert (error <= 1.02 * UNIT[dtype] * most).all()
    assert rotated.dtype == dtype


@pytest.mark.processor
@pytest.mark.parametrize("dtype", UNIT)
@pytest.mark.parametrize("width", WIDTHS)
def test_bits_of_a_rotated_token_do_not_depend_on_the_tokens_beside_it(width: int, dtype: torch.dtype) -> None:
    """In another layout, or in another document, a token has another index. Then its elements are in other places of
    the vector registers, or in the part of another thread."""
    length = 16 + 2**17 // (HEADS * width)  # so many elements that torch divides them among threads
    features, angles = _drawn(ROWS, length, HEADS, width).to(dtype), 7 * _drawn(length, width // 2, seed=1)
    cosine, sine = _table(angles, dtype)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        rotated, of_features = _both(features, (cosine, sine), features)
    finally:
        torch.set_num_threads(before)
    for start, end in ((0, 1), (5, 8), (length - 7, length)):
        part = features[1:, start:end]
        found = _both(part, (cosine[None, start:end], sine[None, start:end]), part)
        assert torch.equal(found[0], rotated[1:, start:end])
        assert torch.equal(found[1], of_features[1:, start:end])


def test_rotation_of_no_sequences_is_empty() -> None:
    table = _table(_angles(16, is_of_documents=False))
    rotated, of_features = _both(_drawn(0, LENGTH, HEADS, 16), table, _drawn(0, LENGTH, HEADS, 16))
    assert rotated.shape == of_features.shape == (0, LENGTH, HEADS, 16)


class _Operations(TorchDispatchMode):
    """Names of the operations that compute, and so launch a kernel on a GPU, and number of new tensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kernels, self.tensors = list[str](), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name.startswith("empty"):
            self.tensors += 1
        elif not func.is_view:
            self.kernels.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("is_of_documents", [False, True])
@pytest.mark.parametrize("dtype", UNIT)
def test_a_rotation_takes_three_kernels_and_one_tensor_in_each_direction(
    dtype: torch.dtype, is_of_documents: bool
) -> None:
    features = _drawn(ROWS, LENGTH, HEADS, 16).to(dtype).requires_grad_()
    table = _table(_angles(16, is_of_documents=is_of_documents), dtype)
    gradient = features.detach().clone()
    with _Operations() as forward:
        rotated = rotate(features, table)
    with _Operations() as backward:
        torch.autograd.grad(rotated, features, gradient)
    assert forward.kernels == backward.kernels == ["mul", "addcmul_", "addcmul_"]
    assert forward.tensors == backward.tensors == 1


def test_only_the_table_is_saved_for_the_backward_pass() -> None:
    features = _drawn(ROWS, LENGTH, HEADS, 16).requires_grad_()
    table, saved = _table(_angles(16, is_of_documents=False)), list[Tensor]()

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        rotate(features, table)
    assert [tensor.data_ptr() for tensor in saved] == [part.data_ptr() for part in table]


@pytest.mark.parametrize("is_of_documents", [False, True])
def test_a_compiled_rotation_is_one_graph_with_the_same_values(is_of_documents: bool) -> None:
    """Compiled for blocks, torch traces both directions; a sum that it fuses may be rounded otherwise."""
    shape, table = (ROWS, LENGTH, HEADS, 16), _table(_angles(16, is_of_documents=is_of_documents))
    features, gradient = _drawn(*shape), _drawn(*shape, seed=2)
    expected = _both(features, table, gradient)
    compiled = torch.compile(rotate, backend="aot_eager", fullgraph=True)
    traced = features.clone().requires_grad_()
    rotated = compiled(traced, table)
    torch.testing.assert_close(rotated, expected[0], rtol=0, atol=1e-14)
    torch.testing.assert_close(torch.autograd.grad(rotated, traced, gradient)[0], expected[1], rtol=0, atol=1e-14)
    torch.compiler.reset()

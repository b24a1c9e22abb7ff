"""Products in float8 against the format's definition."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from pseudoreal_trainer.accelerator.adapter import Adapter
from pseudoreal_trainer.model import float8
from pseudoreal_trainer.model.block import Block
from pseudoreal_trainer.model.float8 import (
    Float8Linear,
    MXFP8Linear,
    ScaledFloat8Linear,
    ScaledMXFP8Linear,
    linear_of,
    multiply_scaled,
    obstacle,
    rounded,
    rounded_blocks,
)
from pseudoreal_trainer.model.rotary import rotary
from torch import Tensor, nn

from tests.support.float8 import NUMBERS, nearest, round_rows
from tests.unit.trainer.engine.support.cases import Case

DTYPES = [torch.bfloat16, torch.float32, torch.float64]


def _drawn(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def test_the_oracle_has_the_numbers_of_torch() -> None:
    bits = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    assert bits.tolist() == NUMBERS
    assert NUMBERS[-1] == 448


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_rounded_to_the_nearest_number(dtype: torch.dtype) -> None:
    """Rows of very different magnitudes, with the numbers half-way between two numbers of the format."""
    magnitudes = torch.tensor([1e-30, 1e-5, 1.0, 300.0, 1e20], dtype=dtype)[:, None]
    rows = _drawn(5, 200, dtype=dtype) * magnitudes
    assert torch.equal(rounded(rows), round_rows(rows))
    middles = torch.tensor([[448.0, *[(a + b) / 2 for a, b in pairwise(NUMBERS)]]]).to(dtype)
    assert torch.equal(rounded(middles), torch.from_numpy(nearest(middles.double().numpy())).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [1, 31, 32, 33, 96, 100])
def test_each_block_of_a_row_has_a_scale_of_its_own(length: int, dtype: torch.dtype) -> None:
    magnitudes = 10.0 ** torch.linspace(-6, 6, length, dtype=torch.float64)
    rows = (_drawn(5, length) * magnitudes).to(dtype)
    found = rounded_blocks(rows)
    assert torch.equal(found, round_rows(rows, block=32))
    assert length <= 32 or not torch.equal(found, round_rows(rows))


@pytest.mark.parametrize("most", [448.0, 449.0, 447.0, 224.0, 1.0, 1.75, 1.76])
def test_the_largest_magnitude_of_a_row_is_used_in_full(most: float) -> None:
    """The largest magnitude stays exact if it is an e4m3 number times a power of two."""
    row = torch.tensor([[most, most / 3, -most]], dtype=torch.float64)
    found = rounded(row)
    assert torch.equal(found, round_rows(row))
    assert abs(float(found[0, 0]) - most) <= most / 16
    assert float(found[0, 2]) == -float(found[0, 0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_smallest_numbers_stay_finite(dtype: torch.dtype) -> None:
    rows = torch.tensor([[1e-37], [1e-38], [1e-39], [1e-40]], dtype=torch.float64).expand(4, 3).to(dtype)
    found = rounded(rows)
    assert found.isfinite().all()
    assert ((found - rows).abs() <= 2**-3 * torch.finfo(dtype).tiny + rows / 16).all()


def test_a_device_gets_the_first_matrix_by_rows_and_the_second_by_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels of GPUs refuse other matrices, a transposed weight among them."""
    seen = list[torch.Size]()

    def multiply(
        left: Tensor, right: Tensor, of_left: Tensor, _: object, of_right: Tensor, __: object, output_dtype: torch.dtype
    ) -> Tensor:
        assert left.stride(1) == right.stride(0) == 1
        assert left.dtype == right.dtype == torch.float8_e4m3fn
        seen.append(right.shape)
        return ((left.float() * of_left) @ (right.float() * of_right)).to(output_dtype)

    monkeypatch.setattr("torch.nn.functional.scaled_mm", multiply)
    layer, inputs = ScaledFloat8Linear(32, 48, dtype=torch.bfloat16), _drawn(16, 32, dtype=torch.bfloat16)
    inputs.requires_grad_()
    out = layer(inputs)
    found = torch.autograd.grad(out.sum(), (inputs, layer.weight))
    assert seen == [(32, 48), (48, 32)]
    on_cpu = Float8Linear(32, 48, dtype=torch.bfloat16)
    on_cpu.load_state_dict(layer.state_dict())
    torch.testing.assert_close(out, on_cpu(inputs), rtol=2**-6, atol=2**-6)
    expected = torch.autograd.grad(on_cpu(inputs).sum(), (inputs, on_cpu.weight))
    torch.testing.assert_close(found, expected, rtol=2**-6, atol=2**-6)


def test_a_device_gets_the_scales_of_blocks_in_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiles are those of cuBLAS ("1D Block Scaling Factors Layout"): 512 scales of 128 rows and 4 blocks, the scale
    of row r and block b at byte (r % 32) * 16 + (r // 32) * 4 + b; tiles are in the order of rows, then blocks."""
    calls = list[str]()

    def in_rows(scales: Tensor, rows: int, blocks: int) -> Tensor:
        assert scales.dtype == torch.float8_e8m0fnu
        flat, found = scales.float(), torch.empty(rows, blocks)
        assert len(flat) == -(-rows // 128) * -(-blocks // 4) * 512
        for row in range(rows):
            for block in range(blocks):
                tile = row // 128 * -(-blocks // 4) + block // 4
                found[row, block] = flat[tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + block % 4]
        return found.repeat_interleave(32, dim=1)

    def multiply(
        left: Tensor, right: Tensor, of_left: Tensor, _: object, of_right: Tensor, *__: object, **says: Any
    ) -> Tensor:
        calls.append(says["swizzle_a"].name)
        assert left.stride(1) == right.stride(0) == 1
        assert left.dtype == right.dtype == torch.float8_e4m3fn
        (n, k), m = left.shape, right.shape[1]
        of_left, of_right = in_rows(of_left, n, k // 32), in_rows(of_right, m, k // 32)
        return ((left.float() * of_left) @ (right.float().t() * of_right).t()).to(says["output_dtype"])

    monkeypatch.setattr("torch.nn.functional.scaled_mm", multiply)
    layer, inputs = ScaledMXFP8Linear(192, 160, dtype=torch.bfloat16), _drawn(256, 192, dtype=torch.bfloat16)
    magnitudes = 10.0 ** torch.linspace(-3, 3, 256).to(torch.bfloat16)
    inputs = (inputs * magnitudes[:192] * magnitudes[:, None]).requires_grad_()
    on_cpu = MXFP8Linear(192, 160, dtype=torch.bfloat16)
    on_cpu.load_state_dict(layer.state_dict())
    out, expected = layer(inputs), on_cpu(inputs)
    most = float(expected.detach().abs().max())
    torch.testing.assert_close(out, expected, rtol=2**-6, atol=2**-6 * most)
    of_rows = torch.testing.assert_close
    of_rows(*(torch.autograd.grad(one.sum(), inputs)[0] for one in (out, expected)), rtol=2**-6, atol=2**-6)
    assert calls == ["SWIZZLE_32_4_4"] * 2
    torch.testing.assert_close(layer(inputs[:70]), expected[:70], rtol=2**-6, atol=2**-6 * most)
    assert len(calls) == 3, "the last tile may be filled in part"
    layer(inputs[:0])
    assert len(calls) == 3


def test_zeros_stay_zeros_and_numbers_that_are_not_finite_stay_so() -> None:
    assert torch.equal(rounded(torch.zeros(2, 3)), torch.zeros(2, 3))
    for bad in (float("nan"), float("inf")):
        found = rounded(torch.tensor([[1.0, bad], [1.0, 2.0]]))
        assert not found[0].isfinite().all()
        assert torch.equal(found[1], torch.tensor([1.0, 2.0]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_other_rows(dtype: torch.dtype) -> None:
    rows = _drawn(6, 40, dtype=dtype)
    assert torch.equal(rounded(rows)[2:4], rounded(rows[2:4]))


def test_a_linear_layer_rounds_both_operands_of_its_output_and_of_the_gradient_of_its_input() -> None:
    layer = Float8Linear(24, 10, dtype=torch.float64)
    plain = nn.Linear(24, 10, dtype=torch.float64)
    plain.load_state_dict(layer.state_dict())
    inputs = _drawn(3, 5, 24).requires_grad_()
    out = layer(inputs)
    expected = round_rows(inputs.flatten(0, 1)) @ round_rows(layer.weight).T + layer.bias
    torch.testing.assert_close(out.flatten(0, 1), expected, rtol=0, atol=1e-14)
    assert not torch.allclose(out, plain(inputs), rtol=1e-4), "the rounding shows"
    gradient = _drawn(3, 5, 10, seed=2)
    of_inputs, of_weight, of_bias = torch.autograd.grad(out, (inputs, layer.weight, layer.bias), gradient)
    rows = gradient.flatten(0, 1)
    wanted = round_rows(rows) @ round_rows(layer.weight.T.contiguous()).T
    torch.testing.assert_close(of_inputs.flatten(0, 1), wanted, rtol=0, atol=1e-14)
    # The gradient of the weight is that of a plain layer.
    for found, name in ((of_weight, "weight"), (of_bias, "bias")):
        (plainly,) = torch.autograd.grad(plain(inputs), (getattr(plain, name),), gradient)
        torch.testing.assert_close(found, plainly, rtol=0, atol=1e-14)


def test_a_cpu_multiplies_the_rounded_numbers() -> None:
    cpu = torch.device("cpu")
    assert obstacle("Float8", cpu, torch.bfloat16) == "the device has no products in float8 with scaled rows"
    assert obstacle("MXFP8", cpu, torch.bfloat16) == "the device has no products in float8 with scaled blocks"
    assert linear_of("Compute", cpu, torch.bfloat16) is nn.Linear
    assert linear_of("MXFP8", cpu, torch.bfloat16) is MXFP8Linear
    assert linear_of("Float8", cpu, torch.bfloat16) is Float8Linear
    layer, inputs = Float8Linear(32, 16, bias=False, dtype=torch.bfloat16), _drawn(4, 32, dtype=torch.bfloat16)
    assert torch.equal(layer(inputs), rounded(inputs).mm(rounded(layer.weight).t()))


def test_a_device_with_products_in_float8_computes_them_for_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Adapter, "can_multiply_float8", lambda _: True)
    device = torch.device("cpu", 7)  # its obstacle is not known to the other tests
    assert obstacle("Float8", device, torch.float32) == (
        "products in float8 have bfloat16 results, and the phase computes in torch.float32"
    )
    monkeypatch.setattr(float8, "obstacle", lambda *_: None)
    assert linear_of("Float8", device, torch.bfloat16) is ScaledFloat8Linear
    assert linear_of("MXFP8", device, torch.bfloat16) is ScaledMXFP8Linear


@pytest.mark.parametrize(("features", "rows"), [(40, 4), (32, 0)])
def test_sizes_that_a_device_refuses_are_multiplied_as_rounded_numbers(features: int, rows: int) -> None:
    """On a CPU, a product of the device would be refused."""
    left, right = (_drawn(n, features, dtype=torch.bfloat16) for n in (rows, 16))
    assert torch.equal(multiply_scaled(left, right), rounded(left).mm(rounded(right).t()))


@pytest.mark.parametrize("linear", [ScaledFloat8Linear, MXFP8Linear])
@pytest.mark.parametrize("is_output_read", [True, False])
def test_a_compiled_block_is_one_graph(
    linear: type[Float8Linear], is_output_read: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No pass looks for obstacles, which would cut the graph. The sizes are too small for products of a device."""
    spec = Case(activation="SwiGLU").model

    def refuse(*_: object) -> None:
        raise AssertionError("modules are built already")

    monkeypatch.setattr(float8, "obstacle", refuse)
    hidden = _drawn(2, spec.sequence_length, spec.hidden_size).requires_grad_()
    rotation = rotary(spec, spec.sequence_length, hidden)
    block = Block(spec, 0, linear).double()
    torch._dynamo.reset()
    compiled = torch.compile(block, backend="eager", fullgraph=True)
    sources = [hidden, *block.parameters()]
    found, expected = (
        torch.autograd.grad(run(hidden, rotation, is_output_read=is_output_read).sum(), sources)
        for run in (compiled, block)
    )
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_the_oracle_rounds_ties_to_even() -> None:
    assert nearest(np.array([1.0625, 1.1875, -1.0625])).tolist() == [1.0, 1.25, -1.0]

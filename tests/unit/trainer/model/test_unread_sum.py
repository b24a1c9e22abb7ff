"""A block that is recomputed only for its gradients: the same bits without the last product."""

from pathlib import Path
from typing import Any

import pytest
import torch
from pseudoreal_api.spec.model import Model
from pseudoreal_trainer.engine.ranks.ranks import Ranks
from pseudoreal_trainer.model.block import Block
from pseudoreal_trainer.model.layers import FeedForward
from pseudoreal_trainer.model.rotary import rotary
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.unit.trainer.engine.support.cases import STEPS, Case
from tests.unit.trainer.engine.support.running import run_case

pytestmark = pytest.mark.processor

ROWS, LENGTH, HIDDEN, INNER = 3, 8, 16, 48


def _model(**fields: Any) -> Model:
    known = {"layers": 1, "hiddenSize": HIDDEN, "attention": {"heads": 2}, "sequenceLength": LENGTH}
    return Model.model_validate(known | {"feedForward": {"size": INNER}} | fields)


class _Products(TorchDispatchMode):
    """Counts products of matrices."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return function(*args, **(kwargs or {}))


def _run(spec: Model, dtype: torch.dtype, *, is_output_read: bool) -> tuple[Tensor, list[Tensor], int]:
    """Return the block's output, the gradients of input and parameters, and the number of products of both passes."""
    torch.manual_seed(1)
    block = Block(spec).to(dtype)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    source = torch.randn(ROWS, LENGTH, HIDDEN, dtype=dtype, requires_grad=True)
    gradient, rotation = torch.randn(ROWS, LENGTH, HIDDEN, dtype=dtype), rotary(spec, LENGTH, source)
    with _Products() as products:
        out = block(source, rotation, is_output_read=is_output_read)
        gradients = torch.autograd.grad(out, [source, *block.parameters()], gradient)
    return out, [*gradients], products.count


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("activation", ["GELU", "SwiGLU"])
@pytest.mark.parametrize("bias", ["None", "All"])
def test_gradients_have_the_same_bits_without_the_last_product(bias: str, activation: str, dtype: torch.dtype) -> None:
    spec = _model(feedForward={"size": INNER, "bias": bias, "activation": activation})
    read, unread = (_run(spec, dtype, is_output_read=is_read) for is_read in (True, False))
    for found, expected in zip(unread[1], read[1], strict=True):
        assert found.equal(expected)
    assert unread[2] == read[2] - 1
    assert unread[0].shape == read[0].shape
    assert unread[0].untyped_storage().nbytes() == dtype.itemsize, "the output takes no memory"


@pytest.mark.parametrize(
    "fields",
    [{"norm": {"placement": "Post"}}, {"norm": {"placement": "Both"}}],
    ids=lambda fields: str(fields),
)
def test_a_norm_behind_the_last_product_needs_the_product(fields: dict[str, Any]) -> None:
    read, unread = (_run(_model(**fields), torch.float64, is_output_read=is_read) for is_read in (True, False))
    assert unread[0].equal(read[0])
    assert unread[2] == read[2]


@pytest.mark.parametrize(
    ("case", "left_out"),
    [
        (Case(), 4 * 2),
        (Case(keep="Products"), 0),
        (Case(keep="All"), 0),
        (Case(options="OLMo2"), 0),
        (Case(options="Mixtral"), 0),
        (Case(options="Qwen3MoE"), 2 * 2),
    ],
    ids=lambda value: value.name if isinstance(value, Case) else str(value),
)
def test_a_step_leaves_out_a_product_for_each_dense_layer_and_micro_batch(
    case: Case, left_out: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of four layers and two micro-batches. A Qwen 3 with experts has two dense layers here."""
    calls, unread_sum = [], FeedForward.unread_sum

    def count(self: FeedForward, residual: Tensor, hidden: Tensor) -> Tensor:
        calls.append(residual.shape)
        return unread_sum(self, residual, hidden)

    monkeypatch.setattr(FeedForward, "unread_sum", count)
    run_case(case, Ranks(0, 1, torch.device("cpu")), tmp_path)
    assert len(calls) == STEPS * left_out

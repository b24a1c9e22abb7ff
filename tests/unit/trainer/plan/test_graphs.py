"""The formulas of graphs.py against autograd and the allocator."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from pseudoreal_trainer.model.transformer import Block, Embedding, Head, rotary
from pseudoreal_trainer.plan.graphs import Graphs
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from tests.unit.trainer.plan.cases import make_sizes

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
MASTERS = {"float32": torch.float32, "bfloat16": torch.float32, "float64": torch.float64}
SHAPES = [(64, 256, 2, 64), (64, 64, 1, 16), (128, 512, 1, 48), (128, 512, 4, 128)]
"""Hidden, inner, sequences, tokens of each: parameters outweigh activations, and the other way."""


MIXTURES = [{"experts": 5}, {"experts": 6, "prototypes": 2}, {"experts": 9, "prototypes": 3}]


def graphs(
    hidden: int, inner: int, rows: int, length: int, compute: str, activation: str, moe: dict[str, Any] | None = None
) -> Graphs:
    """No expert is ever full."""
    ffn, room = {"hidden": inner, "activation": activation}, {"capacityFactor": "100"}
    mixture = None if moe is None else moe | room
    sizes = make_sizes(1, compute=compute, hidden=hidden, heads=4, sequence=length, ffn=ffn, moe=mixture)
    return Graphs(sizes, rows * length)


def block_pass(found: Graphs, compute: str) -> tuple[Block, Tensor, Callable[[Tensor], Tensor]]:
    """A block, its input [B, T, H], and its computation."""
    spec = found.sizes.model
    torch.manual_seed(0)
    block = Block(spec).to(DTYPES[compute])
    source = torch.randn(found.tokens // spec.sequence, spec.sequence, spec.hidden, dtype=DTYPES[compute])
    rotation = rotary(spec.sequence, spec.hidden // spec.heads, source)
    return block, source, lambda hidden: block(hidden, rotation)


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize("compute", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("moe", [None, *MIXTURES], ids=str)
def test_what_autograd_keeps_of_a_block(
    moe: dict[str, Any] | None, shape: tuple[int, int, int, int], compute: str, activation: str
) -> None:
    found = graphs(*shape, compute, activation, moe)
    block, source, run = block_pass(found, compute)
    saved: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        output = run(source.requires_grad_())
    width = source.shape[-1] // 4 // 2
    own = {t.untyped_storage().data_ptr() for t in (source, output, *block.parameters())}
    kept = [t for address, t in saved.items() if address not in own and t.shape[-2:] != (source.shape[1], width)]
    assert sum(t.untyped_storage().nbytes() for t in kept) == found.block


def peak_bytes(act: Callable[[], object], folder: Path) -> int:
    """Most bytes that `act` has allocated at a time."""
    act()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        act()
    recorded.export_chrome_trace(str(folder / "trace.json"))
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    held = most = 0
    for event in sorted((e for e in events if e["name"] == "[memory]"), key=lambda e: e["ts"]):
        held += event["args"]["Bytes"]
        most = max(most, held)
    return most


def masters_of(module: nn.Module, compute: str) -> list[Tensor]:
    """Gradients to which those of a pass are added."""
    return [torch.zeros(p.shape, dtype=MASTERS[compute]) for p in module.parameters()]


def add(totals: list[Tensor], gradients: Sequence[Tensor]) -> None:
    for total, gradient in zip(totals, gradients, strict=True):
        total.add_(gradient)


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize("compute", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_most_bytes_of_a_blocks_backward_pass(
    shape: tuple[int, int, int, int], compute: str, activation: str, tmp_path: Path
) -> None:
    found = graphs(*shape, compute, activation)
    assert block_peak(found, compute, tmp_path) == pytest.approx(found.block_backward, rel=0.08)


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[3]])
@pytest.mark.parametrize("moe", MIXTURES, ids=str)
def test_most_bytes_of_a_mixtures_backward_pass(
    moe: dict[str, Any], shape: tuple[int, int, int, int], compute: str, activation: str, tmp_path: Path
) -> None:
    """Which depends on how the tokens spread over the experts."""
    found = graphs(*shape, compute, activation, moe)
    assert block_peak(found, compute, tmp_path) == pytest.approx(found.block_backward, rel=0.12)


def block_peak(found: Graphs, compute: str, folder: Path) -> int:
    block, source, run = block_pass(found, compute)
    gradient, totals = torch.randn_like(source), masters_of(block, compute)

    def act() -> object:
        inner = source.detach().requires_grad_()
        output = run(inner)
        of_input, *gradients = torch.autograd.grad(output, [inner, *block.parameters()], gradient)
        add(totals, gradients)
        return of_input

    return peak_bytes(act, folder)


@pytest.mark.parametrize("compute", DTYPES)
@pytest.mark.parametrize("shape", [(64, 256, 2, 64), (256, 64, 2, 16), (512, 8, 1, 32)])
def test_most_bytes_of_the_ends_backward_passes(shape: tuple[int, int, int, int], compute: str, tmp_path: Path) -> None:
    found = graphs(*shape, compute, "gelu")
    spec, dtype = found.sizes.model, DTYPES[compute]
    rows = found.tokens // spec.sequence
    tokens = torch.randint(256, (rows, spec.sequence))
    head, embedding = Head(spec).to(dtype), Embedding(spec).to(dtype)
    source = torch.randn(rows, spec.sequence, spec.hidden, dtype=dtype)
    of_head, of_embedding = masters_of(head, compute), masters_of(embedding, compute)

    def act_head() -> object:
        inner = source.detach().requires_grad_()
        loss = F.cross_entropy(head(inner).flatten(0, 1).to(MASTERS[compute]), tokens.flatten(), reduction="sum") / 7
        of_input, *gradients = torch.autograd.grad(loss, [inner, *head.parameters()])
        add(of_head, gradients)
        return of_input

    def act_embedding() -> None:
        add(of_embedding, torch.autograd.grad(embedding(tokens), list(embedding.parameters()), source))

    assert peak_bytes(act_head, tmp_path) == pytest.approx(found.head_backward, rel=0.08)
    assert peak_bytes(act_embedding, tmp_path) == pytest.approx(found.embedding_backward, rel=0.08)

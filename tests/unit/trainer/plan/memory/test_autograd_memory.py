"""Formulas of autograd_memory.py against autograd and the allocator, and against simulated operations of a GPU."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pseudoreal_trainer.model import recomputation
from pseudoreal_trainer.plan.memory.autograd_memory import AutogradMemory
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from tests.unit.trainer.plan.memory.support.allocations import allocated
from tests.unit.trainer.plan.memory.support.gpu import fake_cuda, most_tensor_bytes, operations_of_a_gpu, storage_of
from tests.unit.trainer.plan.memory.support.passes import (
    DTYPES,
    ON_GPUS,
    BlockPass,
    EndPasses,
    Shape,
    documents_of,
    graphs,
)

SHAPES = [(64, 256, 2, 64), (64, 64, 1, 16), (128, 512, 1, 48), (128, 512, 4, 128), (128, 64, 2, 96)]
"""(hidden size, MLP size, sequences, tokens per sequence). Parameters outweigh activations or the reverse; in the last
shape the peak is in the middle of a backward pass."""
ENDS = [(64, 256, 2, 64), (64, 64, 1, 16), (256, 64, 2, 16), (512, 8, 1, 32), (1024, 8, 2, 64)]
"""Shapes whose peak is at the loss, at the head's product, while gradients are added, or at the norm."""
MIXTURES: list[dict[str, Any]] = [
    {"count": 5},
    {"count": 6, "prototypes": 2},
    {"count": 9, "prototypes": 3},
    {"type": "TopK", "count": 5, "topK": {"perToken": 2, "sharedExperts": 1}},
    {"type": "TopK", "count": 4, "topK": {"perToken": 3, "weights": "Scores"}},
    {"type": "TopK", "count": 4, "topK": {"perToken": 2, "routerZLoss": "0.001"}},
    {
        "type": "TopK",
        "count": 6,
        "topK": {"perToken": 2, "score": "Sigmoid", "biasUpdateRate": "0.001", "auxiliaryLoss": "0.01"},
    },
    {"type": "TopK", "count": 6, "topK": {"perToken": 2, "auxiliaryLoss": "0.01", "balanceOver": "Step"}},
]

OPTIONS: dict[str, dict[str, Any]] = {
    "few keys": {"attention": {"keyValueHeads": 2, "headSize": 24}},
    "wide heads": {"attention": {"headSize": 64}},
    "norms of heads": {"attention": {"keyValueHeads": 1, "queryKeyNorm": "PerHead"}},
    "norms of all heads": {"attention": {"queryKeyNorm": "AllHeads"}},
    "norms behind": {"norm": {"placement": "Post"}},
    "norms before and behind": {"norm": {"placement": "Both"}},
    "biases": {"attention": {"bias": "All"}, "feedForward": {"bias": "All"}},
    "a window": {"attention": {"window": {"size": 8}}},
    "an OLMo 2": {"attention": {"keyValueHeads": 2, "queryKeyNorm": "AllHeads"}, "norm": {"placement": "Post"}},
}

Pass = Callable[[], object]


def kept_bytes(one: BlockPass, *, is_selective: bool = False) -> int:
    """Return the bytes that autograd saves, without input, output, weights and rotation."""
    saved: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        recomputed = recomputation.pack(tensor)
        kept = [tensor] if recomputed is None else recomputed.recipe.inputs
        saved.update({storage_of(each): each for each in kept})
        return tensor

    with recomputation.recomputing(enabled=is_selective), saved_tensors_hooks(pack, lambda tensor: tensor):
        output = one.forward(one.source.requires_grad_())
    own = {storage_of(t) for t in (*one.known, output)}
    width = one.rotation[0].shape[-1]
    kept = [t for key, t in saved.items() if key not in own and t.shape[-2:] != (1, width)]
    # Tensors of two integers are the random generator's state, saved for a dropout of zero.
    return sum(t.untyped_storage().nbytes() for t in kept if t.is_floating_point() or t.numel() > 2)


@pytest.mark.parametrize("activation", ["GELU", "SwiGLU"])
@pytest.mark.parametrize("compute", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("experts", [None, *MIXTURES], ids=str)
def test_saved_bytes_of_a_block_equal_autograds(
    experts: dict[str, Any] | None, shape: Shape, compute: str, activation: str
) -> None:
    found = graphs(shape, compute, activation, experts)
    assert kept_bytes(BlockPass(found, compute)) == found.block


@pytest.mark.parametrize("compute", DTYPES)
@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[3]])
@pytest.mark.parametrize("options", OPTIONS)
def test_saved_bytes_of_a_block_with_options_equal_autograds(options: str, shape: Shape, compute: str) -> None:
    found = graphs(shape, compute, "SwiGLU", **OPTIONS[options])
    assert kept_bytes(BlockPass(found, compute)) == found.block


@pytest.mark.parametrize("activation", ["GELU", "SwiGLU"])
@pytest.mark.parametrize("compute", DTYPES)
@pytest.mark.parametrize("experts", [None, *MIXTURES], ids=str)
def test_saved_bytes_of_a_block_with_selective_recomputation_equal_autograds(
    experts: dict[str, Any] | None, compute: str, activation: str
) -> None:
    found = graphs(SHAPES[3], compute, activation, experts, is_selective=True)
    assert kept_bytes(BlockPass(found, compute), is_selective=True) == found.block
    assert found.block < 0.9 * replace(found, is_selective=False).block


@pytest.mark.parametrize("compute", DTYPES)
@pytest.mark.parametrize("options", OPTIONS)
def test_saved_bytes_of_selective_recomputation_with_options_equal_autograds(options: str, compute: str) -> None:
    found = graphs(SHAPES[0], compute, "SwiGLU", is_selective=True, **OPTIONS[options])
    assert kept_bytes(BlockPass(found, compute), is_selective=True) == found.block


@pytest.mark.parametrize("compute", DTYPES)
@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[3], SHAPES[4]])
@pytest.mark.parametrize("options", OPTIONS)
def test_peak_bytes_of_a_backward_pass_with_options(options: str, shape: Shape, compute: str, tmp_path: Path) -> None:
    found = graphs(shape, compute, "SwiGLU", **OPTIONS[options])
    counted = tensor_bytes(BlockPass(found, compute).both, tmp_path)
    assert counted == pytest.approx(found.block_backward, rel=0.03, abs=found.boundary)


def _masked(found: AutogradMemory) -> AutogradMemory:
    return replace(found, sizes=replace(found.sizes, masks_documents=True))


@pytest.mark.parametrize("compute", DTYPES)
@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[3], SHAPES[4]])
@pytest.mark.parametrize("options", ["", "few keys", "a window"])
def test_bytes_of_a_block_whose_documents_are_masked(options: str, shape: Shape, compute: str, tmp_path: Path) -> None:
    """Saved bytes are exact, except for the rotation, which `kept_bytes` leaves out. No mask of token pairs
    is created."""
    found = _masked(graphs(shape, compute, "SwiGLU", **OPTIONS.get(options, {})))
    rotation = found.tokens * found.sizes.model.head_size * found.sizes.compute_bytes
    assert kept_bytes(BlockPass(found, compute)) == found.block - rotation
    counted = tensor_bytes(BlockPass(found, compute).both, tmp_path)
    assert counted == pytest.approx(found.block_backward, rel=0.05, abs=found.boundary)


@pytest.mark.parametrize("is_selective", [False, True])
@pytest.mark.parametrize("activation", ["GELU", "SwiGLU"])
@pytest.mark.parametrize("compute", ON_GPUS)
@pytest.mark.parametrize("shape", SHAPES)
def test_saved_bytes_of_a_block_on_a_gpu_equal_autograds(
    shape: Shape, compute: str, activation: str, is_selective: bool
) -> None:
    """Both the figures and the simulated operations, which also count the backward pass below, are compared with
    torch's own kernels."""
    found = graphs(shape, compute, activation, device="accelerator", is_selective=is_selective)
    with operations_of_a_gpu():
        counted = kept_bytes(BlockPass(found, compute), is_selective=is_selective)
    if not is_selective:  # marked tensors are known by their addresses, and fake tensors have none
        with fake_cuda():
            assert kept_bytes(BlockPass(found, compute)) == counted
    # The planned size of a tensor is rounded up to a block of the allocator.
    assert counted <= found.block < counted + 20 * 512


@pytest.mark.parametrize("compute", ON_GPUS)
@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[4]])
@pytest.mark.parametrize("options", ["", "few keys", "a window"])
def test_saved_bytes_of_masked_documents_on_a_gpu_equal_autograds(options: str, shape: Shape, compute: str) -> None:
    """In bfloat16 torch's own operation with variable lengths says what it saves: one output for all documents, and no
    copy of it. In float32 each document has log-sum-exps of its own, padded to blocks, which are not planned."""
    found = _masked(graphs(shape, compute, "SwiGLU", device="accelerator", **OPTIONS.get(options, {})))
    documents, rotation = documents_of(found), found.tokens * found.sizes.model.head_size * found.sizes.compute_bytes
    with fake_cuda():
        counted = kept_bytes(BlockPass(found, compute, documents))
    if compute == "bfloat16":
        with operations_of_a_gpu():
            assert kept_bytes(BlockPass(found, compute, documents)) == counted
        assert counted <= found.block - rotation < counted + 20 * 512
    else:
        assert counted == pytest.approx(found.block - rotation, rel=0.02)


@pytest.mark.parametrize("shape", SHAPES)
def test_peak_bytes_of_masked_documents_on_a_gpu(shape: Shape) -> None:
    found = _masked(graphs(shape, "bfloat16", "SwiGLU", device="accelerator"))
    with operations_of_a_gpu():
        one = BlockPass(found, "bfloat16")
        one.both()
        most = most_tensor_bytes(one.both, one.known, found.sizes.allocated)
    assert most == pytest.approx(found.block_backward, rel=0.03)


@pytest.mark.parametrize("activation", ["GELU", "SwiGLU"])
@pytest.mark.parametrize("compute", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_peak_bytes_of_a_blocks_backward_pass(shape: Shape, compute: str, activation: str, tmp_path: Path) -> None:
    """Exact, except for the block's output: the engine still holds it while adding gradients, this pass does not."""
    found = graphs(shape, compute, activation)
    counted = tensor_bytes(BlockPass(found, compute).both, tmp_path)
    assert found.block_backward - found.boundary <= counted <= found.block_backward


@pytest.mark.parametrize("activation", ["GELU", "SwiGLU"])
@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[3]])
@pytest.mark.parametrize("experts", MIXTURES, ids=str)
def test_peak_bytes_of_a_mixtures_backward_pass(
    experts: dict[str, Any], shape: Shape, compute: str, activation: str, tmp_path: Path
) -> None:
    """The exact peak depends on how tokens are distributed over the experts."""
    found = graphs(shape, compute, activation, experts)
    assert tensor_bytes(BlockPass(found, compute).both, tmp_path) == pytest.approx(found.block_backward, rel=0.12)


@pytest.mark.parametrize("activation", ["GELU", "SwiGLU"])
@pytest.mark.parametrize("compute", ON_GPUS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("experts", [None, MIXTURES[1]], ids=str)
def test_peak_bytes_of_a_blocks_backward_pass_on_a_gpu(
    experts: dict[str, Any] | None, shape: Shape, compute: str, activation: str
) -> None:
    found = graphs(shape, compute, activation, experts, device="accelerator")
    with operations_of_a_gpu():
        one = BlockPass(found, compute)
        one.both()
        most = most_tensor_bytes(one.both, one.known, found.sizes.allocated)
    assert most == pytest.approx(found.block_backward, rel=0.03 if experts is None else 0.12)


@pytest.mark.parametrize("compute", DTYPES)
@pytest.mark.parametrize("shape", ENDS)
def test_peak_bytes_of_embedding_and_head_backward_passes(shape: Shape, compute: str, tmp_path: Path) -> None:
    found = graphs(shape, compute, "GELU")
    ends = EndPasses(found, compute)
    # Not counted: the loss, its share of the batch's loss and the share's gradient, 4 or 8 bytes each.
    assert tensor_bytes(ends.of_the_head, tmp_path) == pytest.approx(found.head_backward, abs=24)
    assert tensor_bytes(ends.of_the_embedding, tmp_path) == found.embedding_backward


@pytest.mark.parametrize("compute", DTYPES)
@pytest.mark.parametrize("most", [None, 24, 16])
@pytest.mark.parametrize(("cap", "has_z_loss"), [(None, False), ("30", False), (None, True), ("30", True)])
def test_peak_bytes_of_a_loss_in_chunks(
    cap: str | None, has_z_loss: bool, most: int | None, compute: str, tmp_path: Path
) -> None:
    """The vocabulary is so large that logits dominate the peak."""
    found = graphs((64, 256, 2, 24), compute, "GELU", vocabularySize=5000, logitSoftCap=cap)
    found = replace(found, max_chunk_tokens=most, sizes=replace(found.sizes, has_z_loss=has_z_loss))
    counted = tensor_bytes(EndPasses(found, compute).of_the_head, tmp_path)
    # A few numbers per token of a chunk are not counted.
    assert counted == pytest.approx(found.head_backward, abs=8 * 8 * 48 if has_z_loss else 64)


def test_chunks_bound_the_memory_of_a_vocabulary_of_50_thousand() -> None:
    """512 tokens in chunks of 64 take no more than 64 tokens."""
    found = replace(graphs((16, 64, 4, 128), "float32", "GELU", vocabularySize=50_304), max_chunk_tokens=64)
    ends = EndPasses(found, "float32")
    most = most_tensor_bytes(ends.of_the_head, ends.known, found.sizes.allocated)
    assert most == pytest.approx(found.head_backward, rel=0.01)
    assert most < 3.1 * 64 * 50_304 * 4 < replace(found, max_chunk_tokens=None).head_backward / 7


@pytest.mark.parametrize("compute", ON_GPUS)
@pytest.mark.parametrize("shape", ENDS)
def test_peak_bytes_of_embedding_and_head_backward_passes_on_a_gpu(shape: Shape, compute: str) -> None:
    found = graphs(shape, compute, "GELU", device="accelerator")
    with operations_of_a_gpu():
        ends = EndPasses(found, compute)
        head = most_tensor_bytes(ends.of_the_head, ends.known, found.sizes.allocated)
        embedding = most_tensor_bytes(ends.of_the_embedding, ends.known, found.sizes.allocated)
    # Not counted: the loss, its share of the batch's loss and the share's gradient, one allocator block each.
    assert head == pytest.approx(found.head_backward, abs=3 * 512)
    assert embedding == found.embedding_backward


def tensor_bytes(act: Pass, folder: Path) -> int:
    act()
    return allocated(act, folder).tensors

"""Attention within documents on a GPU: one call of flash attention for all documents against a call for each."""

from collections.abc import Callable

import pytest
import torch
from pseudoreal_trainer.model import attention
from pseudoreal_trainer.model.attention import attend_within, find_documents, varlen_obstacle, window_mask
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from tests.gpu.conftest import Figure

pytestmark = pytest.mark.gpu

END, LENGTH, SEQUENCES = 0, 2048, 4


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize(("heads", "key_heads", "width"), [(8, 8, 64), (4, 4, 128), (8, 2, 64)])
def test_one_call_equals_a_call_for_each_document(
    heads: int,
    key_heads: int,
    width: int,
    window: int | None,
    gpu: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    figure: Figure,
) -> None:
    if (obstacle := varlen_obstacle(gpu, torch.bfloat16, heads, key_heads, width)) is not None:
        pytest.skip(obstacle)
    torch.manual_seed(5)
    tokens = torch.randint(0, 150, (SEQUENCES, LENGTH + 1))  # a document ends after 150 tokens on average
    documents = find_documents(tokens, END, tokens.to(gpu))
    query, key, value = (
        torch.randn(SEQUENCES, LENGTH, number, width, device=gpu, dtype=torch.bfloat16, requires_grad=True)
        for number in (heads, key_heads, key_heads)
    )
    mask = None if window is None else window_mask(LENGTH, window, query)

    def results() -> list[Tensor]:
        out = attend_within(documents, query, key, value, mask, window)
        return [out, *torch.autograd.grad(out.float().square().sum(), [query, key, value])]

    found, count = results(), launches(results)
    monkeypatch.setattr(attention, "varlen_obstacle", lambda *_: "none, but the other way is wanted")
    expected, count_of_each = results(), launches(results)
    worst = max(_difference(one, other) for one, other in zip(found, expected, strict=True))
    figure(f"differ by {worst:.1e} of their size at most; {count} kernels instead of {count_of_each}")
    assert worst < 3e-2
    assert count < 50 < count_of_each, "one call launches as many kernels for any number of documents"


def _difference(one: Tensor, other: Tensor) -> float:
    return (one.float() - other.float()).abs().max().item() / other.float().abs().max().item()


def launches(act: Callable[[], object]) -> int:
    """Return how many kernels `act` runs on the GPU, according to torch's profiler."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        act()
        torch.cuda.synchronize()
    # Copies and memory that is set are no kernels.
    return sum(event.device_type.name == "CUDA" and "Mem" not in event.name for event in profiler.events())

"""The memory plan of a pass against a GPU's allocator; `measure-hardware` measures the remainder."""

from collections.abc import Callable

import pytest
import torch
from pseudoreal_trainer.measure.passes import scratch_share

from tests.gpu.conftest import Figure
from tests.unit.trainer.plan.memory.support.passes import ON_GPUS, BlockPass, EndPasses, graphs

pytestmark = pytest.mark.gpu

SHAPE = (1024, 4096, 4, 512)
SCRATCH = 0.25
"""Upper bound on the share that kernels hold as scratch: float32 sums of attention's backward pass."""


@pytest.mark.parametrize("activation", ["GELU", "SwiGLU"])
@pytest.mark.parametrize("compute", ON_GPUS)
def test_peak_bytes_of_a_blocks_backward_pass_equal_the_prediction(
    compute: str, activation: str, gpu: torch.device, figure: Figure
) -> None:
    found = graphs(SHAPE, compute, activation, device="accelerator")
    with gpu:
        one = BlockPass(found, compute)
    one.both()
    share = scratch_share(one.both, gpu, found.block_backward)
    figure(f"kernels hold {share:.1%} besides {found.block_backward} bytes")
    assert share < SCRATCH
    assert peak(one.both, gpu) > 0.97 * found.block_backward


@pytest.mark.parametrize("compute", ON_GPUS)
def test_peak_bytes_of_the_heads_backward_pass_equal_the_prediction(
    compute: str, gpu: torch.device, figure: Figure
) -> None:
    found = graphs(SHAPE, compute, "GELU", device="accelerator")
    with gpu:
        ends = EndPasses(found, compute)
    ends.of_the_head()
    most = peak(ends.of_the_head, gpu)
    figure(f"{most} bytes, {most / found.head_backward:.3f} of those planned")
    assert most == pytest.approx(found.head_backward, rel=0.1)


def peak(act: Callable[[], object], gpu: torch.device) -> int:
    """Return the peak bytes that `act` allocates."""
    torch.cuda.reset_peak_memory_stats(gpu)
    before = torch.cuda.memory_allocated(gpu)
    act()
    torch.cuda.synchronize(gpu)
    return torch.cuda.max_memory_allocated(gpu) - before

"""Number of kernels that torch launches on a GPU, according to its profiler."""

from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile


def launches(act: Callable[[], object]) -> int:
    """Return how many kernels `act` runs on the GPU."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        act()
        torch.cuda.synchronize()
    # Copies and memory that is set are no kernels.
    return sum(event.device_type.name == "CUDA" and "Mem" not in event.name for event in profiler.events())

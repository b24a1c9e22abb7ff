"""Memory that kernels allocate for themselves in a pass: the allocator's bytes beyond those in the plan."""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile


def scratch_share(act: Callable[[], object], device: torch.device, planned: int) -> float:
    """Return the bytes of scratch memory per byte of `planned`, which is the peak of `act` according to the plan."""
    most = _most_on_gpu(act, device) if device.type == "cuda" else most_on_cpu(act)
    return max(0.0, most / planned - 1)


def most_on_cpu(act: Callable[[], object]) -> int:
    """Return the peak of bytes allocated by `act`. torch's profiler reports allocations only in a trace file."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        act()
    with tempfile.TemporaryDirectory(prefix="pseudoreal-") as folder:
        file = Path(folder, "trace.json")
        recorded.export_chrome_trace(str(file))
        events = json.loads(file.read_text())["traceEvents"]
    held = most = 0
    for event in sorted((event for event in events if event["name"] == "[memory]"), key=lambda event: event["ts"]):
        held += event["args"]["Bytes"]
        most = max(most, held)
    return most


def _most_on_gpu(act: Callable[[], object], device: torch.device) -> int:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    act()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before

"""Bytes that torch allocates on this CPU.

CPU kernels also allocate scratch memory, and its size depends on the processor: oneDNN packs the operands of a matrix
product for the instructions that it finds, and attention has sums for each thread. The memory plan counts tensors only,
so scratch memory is counted separately here.
"""

import json
import math
from bisect import bisect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

_ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu"
_WITH_SCRATCH = ("aten::mm", "aten::bmm", "aten::addmm", _ATTENTION, f"{_ATTENTION}_backward")


@dataclass(frozen=True)
class Allocated:
    left: int
    """Bytes still allocated after the call."""
    tensors: int
    """Peak bytes of tensors."""
    most: int
    """Peak bytes including the scratch memory that matrix products and attention hold while they run."""


def allocated(act: Callable[[], object], folder: Path) -> Allocated:
    """Return the bytes that `act` allocates on the CPU, as recorded by the allocator."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        kept = act()
    recorded.export_chrome_trace(str(folder / "trace.json"))
    del kept
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    changes = sorted((e for e in events if e["name"] == "[memory]"), key=lambda e: e["ts"])
    kernels = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e["name"] in _WITH_SCRATCH and e["ph"] == "X")
    scratch = set(_within(changes, kernels))
    held = tensors = most_tensors = most = 0
    for number, event in enumerate(changes):
        held += event["args"]["Bytes"]
        tensors += 0 if number in scratch else event["args"]["Bytes"]
        most, most_tensors = max(most, held), max(most_tensors, tensors)
    return Allocated(held, most_tensors, most)


def _within(changes: Sequence[dict[str, Any]], spans: Sequence[tuple[float, float]]) -> Iterator[int]:
    """Yield the indices of allocations that are freed within the same span, and of the events that free them."""
    made: dict[int, tuple[int, int]] = {}
    for number, event in enumerate(changes):
        span, address = bisect(spans, (event["ts"], math.inf)) - 1, event["args"]["Addr"]
        if event["args"]["Bytes"] > 0 and span >= 0 and event["ts"] <= spans[span][1]:
            made[address] = (span, number)
        elif address in made:
            begun, first = made.pop(address)
            if begun == span and event["ts"] <= spans[span][1]:
                yield from (first, number)

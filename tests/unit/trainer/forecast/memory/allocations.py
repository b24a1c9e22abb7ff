"""Bytes that torch allocates on this CPU.

Kernels of a CPU's library allocate memory for themselves as well, and how much depends on the processor: oneDNN packs
the operands of a matrix product for the instructions that it finds. The plan speaks of tensors, so that is told apart.
"""

import json
import math
from bisect import bisect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

_PRODUCTS = ("aten::mm", "aten::bmm", "aten::addmm")


@dataclass(frozen=True)
class Allocated:
    left: int
    """Bytes that are there afterwards."""
    tensors: int
    """Most bytes of tensors at a time."""
    most: int
    """Most bytes at a time, with those that matrix products hold while they run."""


def allocated(act: Callable[[], object], folder: Path) -> Allocated:
    """By `act` on the CPU, as the allocator tells it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        kept = act()
    recorded.export_chrome_trace(str(folder / "trace.json"))
    del kept
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    changes = sorted((e for e in events if e["name"] == "[memory]"), key=lambda e: e["ts"])
    products = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e["name"] in _PRODUCTS and e["ph"] == "X")
    scratch = set(_within(changes, products))
    held = tensors = most_tensors = most = 0
    for number, event in enumerate(changes):
        held += event["args"]["Bytes"]
        tensors += 0 if number in scratch else event["args"]["Bytes"]
        most, most_tensors = max(most, held), max(most_tensors, tensors)
    return Allocated(held, most_tensors, most)


def _within(changes: Sequence[dict[str, Any]], spans: Sequence[tuple[float, float]]) -> Iterator[int]:
    """Numbers of allocations that are given back in the very span in which they are made, and of their ends."""
    made: dict[int, tuple[int, int]] = {}
    for number, event in enumerate(changes):
        span, address = bisect(spans, (event["ts"], math.inf)) - 1, event["args"]["Addr"]
        if event["args"]["Bytes"] > 0 and span >= 0 and event["ts"] <= spans[span][1]:
            made[address] = (span, number)
        elif address in made:
            begun, first = made.pop(address)
            if begun == span and event["ts"] <= spans[span][1]:
                yield from (first, number)

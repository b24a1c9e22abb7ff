"""Activity of the GPU and the engine's side thread on one clock, as recorded by torch's profiler."""

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

_CLOCK = "clock"


@dataclass(frozen=True)
class Span:
    """A period in microseconds."""

    begin: float
    end: float


@dataclass(frozen=True)
class Timeline:
    kernels: list[Span]
    to_device: list[Span]
    to_host: list[Span]
    offset: float
    """Microseconds to add to time.perf_counter_ns (in microseconds) to get the clock of the spans."""

    @property
    def hidden_share(self) -> float | None:
        """Share of the copies' time during which kernels also run; None without copies."""
        return share_of([*self.to_device, *self.to_host], self.kernels)

    def of_host(self, events: Iterable[dict[str, Any]], name: str) -> list[Span]:
        """Return the engine's own events with this name as spans."""
        begins = [(event["ts"] + self.offset, event["dur"]) for event in events if event["name"] == name]
        return [Span(begin, begin + length) for begin, length in begins]


def record(work: Callable[[], None], file: Path) -> Timeline:
    """Run `work` under torch.profiler, and write the trace to `file`."""
    # Without a GPU, torch would warn about the requested CUDA activity.
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    with profile(activities=activities) as profiler:
        now = time.perf_counter_ns() / 1000
        with record_function(_CLOCK):
            work()
    profiler.export_chrome_trace(str(file))
    events = [event for event in json.loads(file.read_text())["traceEvents"] if event.get("ph") == "X"]
    clock = next(event for event in events if event["name"] == _CLOCK and event["cat"] == "user_annotation")
    return Timeline(
        kernels=_spans(event for event in events if event.get("cat") == "kernel"),
        to_device=_spans(_copies(events, "HtoD")),
        to_host=_spans(_copies(events, "DtoH")),
        offset=clock["ts"] - now,
    )


def share_of(some: Iterable[Span], others: Iterable[Span]) -> float | None:
    """Return the share of the time of `some` during which `others` also run; None if `some` is empty."""
    spans = [*some]
    return shared(spans, others) / shared(spans, spans) if spans else None


def shared(some: Iterable[Span], others: Iterable[Span]) -> float:
    """Return the microseconds during which both have a span."""
    first, second = _merged(some), _merged(others)
    total, i, j = 0.0, 0, 0
    while i < len(first) and j < len(second):
        total += max(0.0, min(first[i].end, second[j].end) - max(first[i].begin, second[j].begin))
        if first[i].end < second[j].end:
            i += 1
        else:
            j += 1
    return total


def _copies(events: Iterable[dict[str, Any]], direction: str) -> Iterable[dict[str, Any]]:
    return (event for event in events if event.get("cat") == "gpu_memcpy" and direction in event["name"])


def _spans(events: Iterable[dict[str, Any]]) -> list[Span]:
    return [Span(event["ts"], event["ts"] + event["dur"]) for event in events]


def _merged(spans: Iterable[Span]) -> list[Span]:
    """Return the spans merged: ascending and disjoint."""
    merged: list[Span] = []
    for span in sorted(spans, key=lambda span: span.begin):
        if merged and span.begin <= merged[-1].end:
            merged[-1] = Span(merged[-1].begin, max(merged[-1].end, span.end))
        else:
            merged.append(span)
    return merged

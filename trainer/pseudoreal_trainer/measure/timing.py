"""Timing of functions on a device."""

import statistics
import time
from collections.abc import Callable

import torch

from pseudoreal_trainer.engine.ranks.ranks import Ranks
from pseudoreal_trainer.estimate.time.hardware import TransferSpeed

_LEAST_SECONDS = 0.06
_LEAST_TIMES, _MOST_TIMES = 2, 200
_TOGETHER = 15
"""Number of runs of a function that ranks call together; fixed, because it must be equal on all ranks."""


def seconds_of(act: Callable[[], object], device: torch.device) -> float:
    """Return the median seconds of several runs, after one warm-up run."""
    _timed(act, device)
    times: list[float] = []
    while len(times) < _LEAST_TIMES or (sum(times) < _LEAST_SECONDS and len(times) < _MOST_TIMES):
        times.append(_timed(act, device))
    return statistics.median(times)


def seconds_together(act: Callable[[], object], ranks: Ranks) -> float:
    """Return the median seconds of a function that all ranks call at the same time, averaged over the ranks.
    Collective."""
    times = []
    for _ in range(_TOGETHER):
        ranks.from_first(0)  # a barrier: all ranks start at the same time
        times.append(_timed(act, ranks.device))
    return float(ranks.sum_(torch.tensor(statistics.median(times[1:]), device=ranks.device)).item()) / ranks.world


def line_through(small: tuple[int, float], large: tuple[int, float]) -> TransferSpeed:
    """Return latency and speed from two (bytes, seconds) measurements."""
    (size, seconds), (more, longer) = small, large
    pace = max(longer - seconds, 1e-9) / (more - size)
    return TransferSpeed(latency_seconds=max(0.0, seconds - size * pace), bytes_per_second=1 / pace)


def _timed(act: Callable[[], object], device: torch.device) -> float:
    _wait_for(device)
    begin = time.perf_counter()
    act()
    _wait_for(device)
    return time.perf_counter() - begin


def _wait_for(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)

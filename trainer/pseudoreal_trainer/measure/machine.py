"""Measurement of a machine with one rank, and with one rank per device (per core without a GPU), at most 8."""

import os
import platform
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import multiprocessing

from pseudoreal_trainer.estimate.time.hardware import HardwareProfile, Speeds
from pseudoreal_trainer.measure.rank import measure, result, tasks
from pseudoreal_trainer.threads import usable_processors

_MOST_RANKS = 8
DEVICE_RESERVE = 2 * 2**30
"""Device bytes not available to tensors: the CUDA context, memory of cuBLAS and NCCL, and fragmentation in torch's
allocator."""
Progress = Callable[[str], None]


def measurements() -> int:
    """Return the number of progress messages of `measure_machine`."""
    return len(_rank_counts()) * tasks(_device())


def measure_machine(progress: Progress) -> HardwareProfile:
    """Return the profile of this machine. Raises the error of a failed rank."""
    on_gpu = _device().type == "cuda"
    # As in the pods: threads that spin while they wait would steal time from the other ranks.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    with tempfile.TemporaryDirectory(prefix="pseudoreal-") as folder:
        speeds = [_measure_with(ranks, Path(folder), progress) for ranks in _rank_counts()]
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return HardwareProfile(
        name=torch.cuda.get_device_name() if on_gpu else f"{platform.node()}, {usable_processors()} cores",
        overlaps=on_gpu,
        device_bytes=torch.cuda.get_device_properties(0).total_memory - DEVICE_RESERVE if on_gpu else None,
        host_bytes=memory // max(_rank_counts()),
        speeds=speeds,
    )


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _rank_counts() -> list[int]:
    most = torch.cuda.device_count() if torch.cuda.is_available() else usable_processors()
    return sorted({1, min(most, _MOST_RANKS)})


def _measure_with(ranks: int, folder: Path, progress: Progress) -> Speeds:
    said: Any = multiprocessing.get_context("spawn").SimpleQueue()
    arguments = (ranks, _device().type, folder, said)
    context: Any = multiprocessing.spawn(_run, arguments, nprocs=ranks, join=False)  # type: ignore[attr-defined, no-untyped-call]
    while not context.join(timeout=0.1):
        while not said.empty():
            progress(f"{ranks} rank{'s' if ranks > 1 else ''}: {said.get()}")
    return Speeds.model_validate_json(result(folder, ranks).read_text())


def _run(rank: int, world: int, device_type: str, folder: Path, said: Any) -> None:
    measure(rank, world, device_type, folder, said.put if rank == 0 else _silently)


def _silently(_: str) -> None:
    pass

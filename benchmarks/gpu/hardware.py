"""Measure the hardware profile for predictions, as `measure-hardware` does, but within seconds and only for the
measured models."""

from collections.abc import Iterable
from typing import Any

import torch
from pseudoreal_api.spec.model import Model
from pseudoreal_trainer.accelerator.adapters import kind_of
from pseudoreal_trainer.estimate.time.hardware import HardwareProfile, Speeds, TransferSpeed
from pseudoreal_trainer.measure import transfers
from pseudoreal_trainer.measure.overhead import pass_seconds
from pseudoreal_trainer.measure.passes import Cell, measure_cell

_CPU = torch.device("cpu")
_RANKS = 1
_NOWHERE = TransferSpeed(latency_seconds=0, bytes_per_second=1e12)
"""Placeholder for the speed of networks, because a single rank sends nothing."""


def quick_profile(device: torch.device, models: Iterable[Model], tokens: Iterable[int]) -> HardwareProfile:
    """Return a profile for bfloat16 passes over micro-batches of these token counts. The measured disk holds TMPDIR."""
    lengths, widths = sorted({*tokens}), sorted({model.hidden_size for model in models})
    kind = kind_of(device)
    cells = [Cell("bfloat16", hidden=width, tokens=length, device=kind) for width in widths for length in lengths]
    on_gpu = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if on_gpu else "cpu"
    return HardwareProfile(name=name, overlaps=on_gpu, speeds=[_speeds(device, cells)])


def _speeds(device: torch.device, cells: list[Cell]) -> Speeds:
    disk_read, disk_write = transfers.disk()
    measured: dict[str, Any] = {
        "passes": [measure_cell(cell, device) for cell in cells],
        "pass_seconds": pass_seconds(device),
        "memory_bytes_per_second": transfers.memory_bytes_per_second(device, _RANKS),
        "update_on_device_seconds_per_element": transfers.update_seconds_per_element(device, _RANKS),
        "update_on_host_seconds_per_element": transfers.update_seconds_per_element(_CPU, _RANKS),
        "h2d": transfers.copies(_CPU, device, _RANKS),
        "d2h": transfers.copies(device, _CPU, _RANKS),
        "disk_read": disk_read,
        "disk_write": disk_write,
    }
    return Speeds(ranks=_RANKS, point_to_point=_NOWHERE, collectives=[], agree_seconds=0.0, **measured)

"""The accelerators of a machine, and the adapter of each."""

import torch

from pseudoreal_trainer.accelerator.adapter import Adapter
from pseudoreal_trainer.accelerator.cuda import CudaAdapter
from pseudoreal_trainer.plan.sizes import Device

_ADAPTERS: dict[str, type[Adapter]] = {"cuda": CudaAdapter}
"""Type of a device in torch -> adapter; other types have the fall-back."""


def adapter_of(device: torch.device) -> Adapter:
    """Return the adapter of an accelerator."""
    return _ADAPTERS.get(device.type, Adapter)(device)


def found_accelerators() -> list[torch.device]:
    """Return the accelerators of this machine that ranks can train on. Apple's (MPS) have no streams and no
    collectives."""
    kind = torch.accelerator.current_accelerator()
    if kind is None or kind.type == "mps":
        return []
    return [torch.device(kind.type, index) for index in range(torch.accelerator.device_count())]


def kind_of(device: torch.device) -> Device:
    """Return the device's kind in plans."""
    return "cpu" if device.type == "cpu" else "accelerator"

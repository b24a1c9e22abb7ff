"""The adapter of each device."""

import torch

from pseudoreal_trainer.accelerator.adapter import Adapter
from pseudoreal_trainer.accelerator.cuda import CudaAdapter
from pseudoreal_trainer.plan.sizes import Device

_ADAPTERS: dict[str, type[Adapter]] = {"cuda": CudaAdapter}
"""Type of a device in torch -> adapter; other types have the fall-back."""


def adapter_of(device: torch.device) -> Adapter:
    """Return the adapter of an accelerator."""
    return _ADAPTERS.get(device.type, Adapter)(device)


def kind_of(device: torch.device) -> Device:
    """Return the device's kind in plans."""
    return "cpu" if device.type == "cpu" else "accelerator"

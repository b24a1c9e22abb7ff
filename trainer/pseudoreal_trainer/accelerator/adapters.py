"""The adapter of each device."""

import torch

from pseudoreal_trainer.accelerator.adapter import Adapter
from pseudoreal_trainer.accelerator.cuda import CudaAdapter

_ADAPTERS: dict[str, type[Adapter]] = {"cuda": CudaAdapter}
"""Type of a device in torch -> adapter; other types have the fall-back."""


def adapter_of(device: torch.device) -> Adapter:
    """Return the adapter of an accelerator."""
    return _ADAPTERS.get(device.type, Adapter)(device)

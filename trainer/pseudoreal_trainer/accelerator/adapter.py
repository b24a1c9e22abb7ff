"""The fall-back: what works on the devices of every vendor, through torch's common interface."""

import torch


class Adapter:
    """Calls for one accelerator. XPU and NPU use this class itself; nobody has tried either."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def event(self, *, is_timed: bool = False) -> torch.Event:
        """Return a new event. `is_timed`: whether its time can be read."""
        return torch.Event(self.device, enable_timing=is_timed)

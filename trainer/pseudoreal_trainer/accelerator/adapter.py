"""The fall-back: what works on the devices of every vendor, through torch's common interface."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_PAGE = 4096


class Adapter:
    """Calls for one accelerator. XPU and NPU use this class itself; nobody has tried either."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @property
    def name(self) -> str:
        """Name of the device's model, for instance NVIDIA H100 80GB HBM3."""
        module: Any = torch.get_device_module(self.device)
        return str(module.get_device_name(self.device))

    def check(self) -> None:
        """Raise TrainingError if torch cannot run on the device."""

    def event(self, *, is_timed: bool = False) -> torch.Event:
        """Return a new event. `is_timed`: whether its time can be read."""
        return torch.Event(self.device, enable_timing=is_timed)

    def pin(self, memory: Tensor) -> Tensor:
        """Return pinned memory, [size] bytes, all zero, that starts at a page: `memory` itself, which is such memory
        but not pinned, or other memory in its place. Raises TrainingError if the system cannot pin that much."""
        # torch's allocator of pinned memory rounds up to a power of two, which the forecast does not count.
        whole = torch.zeros(len(memory) + _PAGE, dtype=torch.uint8, pin_memory=True)
        begin = -whole.data_ptr() % _PAGE
        return whole[begin : begin + len(memory)]

    def unpin(self, _: Tensor) -> None:
        """Make memory of `pin` ordinary memory again, once no copy reads or writes it."""
        torch.accelerator.synchronize(self.device)

    def split_group(self, members: Sequence[Sequence[int]], timeout: timedelta | None) -> object:
        """Return the group of this rank on the device's backend; torch's mark of a stranger if no group has this rank.
        `members`: disjoint sets of ranks. All ranks call this with the same sets in the same order."""
        made = [dist.new_group([*ranks], timeout=timeout) for ranks in members]
        return next((group for group in made if isinstance(group, dist.ProcessGroup)), None)

    def can_multiply_float8(self) -> bool:
        """Return whether `torch.nn.functional.scaled_mm` multiplies float8 matrices with scaled rows on the device."""
        return False

    def can_multiply_mxfp8(self) -> bool:
        """Return whether `torch.nn.functional.scaled_mm` multiplies float8 matrices with scaled blocks of 32 numbers on
        the device."""
        return False

    def can_group(self, _: torch.dtype) -> bool:
        """Return whether `torch.nn.functional.grouped_mm` multiplies matrices of this type on the device."""
        return False

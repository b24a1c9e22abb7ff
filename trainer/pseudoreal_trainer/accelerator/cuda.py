"""NVIDIA's devices, and AMD's, which have the same names in torch."""

import re
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from pseudoreal_trainer.accelerator.adapter import Adapter
from pseudoreal_trainer.errors import TrainingError


class CudaAdapter(Adapter):
    """Calls for one of NVIDIA's or AMD's devices."""

    def check(self) -> None:
        """Raise TrainingError if torch has no code for the GPU. Its first kernel would fail, with an error that names
        neither."""
        architectures = [found for name in torch.cuda.get_arch_list() if (found := _ARCHITECTURE.fullmatch(name))]
        capability = torch.cuda.get_device_capability(self.device)
        if architectures and not any(_runs_on(architecture, capability) for architecture in architectures):
            known = ", ".join(dict.fromkeys(f"{found['major']}.{found['minor']}" for found in architectures))
            raise TrainingError(
                f"the GPU {self.name} has compute capability {capability[0]}.{capability[1]}, and"
                f" torch {torch.__version__} in this image has code for {known}: choose other nodes in"
                " phases[].pod.template, or an image whose torch has code for this GPU in pod.image"
            )

    def event(self, *, is_timed: bool = False) -> torch.Event:
        # A thread that waits for a blocking event sleeps. Waiting for others takes a whole core, which AdamW on the
        # host or another rank needs. torch.Event ignores `blocking`.
        return torch.cuda.Event(enable_timing=is_timed, blocking=True)

    def pin(self, memory: Tensor) -> Tensor:
        with torch.accelerator.device_index(self.device.index):
            failed = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), len(memory), 0))
        if failed:
            raise TrainingError(
                f"{len(memory):,} bytes of host memory cannot be pinned for copies to and from the GPU (CUDA error"
                f" {failed}); give the pod more memory, or let units move to disk (offload.budget.host, offload.homes)"
            )
        return memory

    def unpin(self, memory: Tensor) -> None:
        # torch does not track this memory. Wait here, so that no pending copy reads or writes freed memory.
        super().unpin(memory)
        torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())

    def split_group(self, members: Sequence[Sequence[int]], timeout: timedelta | None) -> object:
        # One collective call of all ranks creates all these groups together.
        return dist.split_group(split_ranks=[[*ranks] for ranks in members], timeout=timeout)

    def can_multiply_float8(self) -> bool:
        # AMD's GPUs have another format of float8, whose largest number is smaller.
        return torch.version.hip is None and torch.cuda.get_device_capability(self.device) >= (8, 9)

    def can_multiply_mxfp8(self) -> bool:
        return torch.version.hip is None and torch.cuda.get_device_capability(self.device) >= (10, 0)

    def can_group(self, dtype: torch.dtype) -> bool:
        return dtype is torch.bfloat16 and torch.cuda.get_device_capability(self.device) >= (8, 0)


_ARCHITECTURE = re.compile(r"(?P<kind>sm|compute)_(?P<major>\d+)(?P<minor>\d)(?P<suffix>[a-z]?)")
"""Name of an architecture in torch.cuda.get_arch_list: sm is machine code, compute is code that a driver compiles."""


def _runs_on(architecture: re.Match[str], capability: tuple[int, int]) -> bool:
    """Return whether the code runs on a GPU of that compute capability: machine code on the same and later minor
    versions, code for the driver on all later versions; with the suffix f, either on the same and later minor versions,
    and with the suffix a, on its own version alone."""
    own = int(architecture["major"]), int(architecture["minor"])
    if architecture["suffix"] == "a":
        return own == capability
    is_for_all_later = architecture["kind"] == "compute" and not architecture["suffix"]
    return own <= capability and (is_for_all_later or own[0] == capability[0])
